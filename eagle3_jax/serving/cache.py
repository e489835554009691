"""The cache manager: which slot a request gets, what of its prompt the slot holds already, and what all of it costs.

A slot is one row of every key/value cache, of target and draft. A freed slot keeps its entries, and a prompt that
begins with the same tokens is read from where they part. Entry i of the target depends on tokens 0..i, entry i of the
draft on token i + 1 as well (it pairs the features of token i with the embedding of the next), so the draft can keep
one entry less than the target; and to go on, it needs the features of the last token kept, which only reading that
token gives. Hence p equal tokens spare p - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.target import Target


@dataclass(eq=False)
class Slot:
    """row: in the caches. tokens: those in the target's cache; draft_read: right entries of the draft's cache."""

    row: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    draft_read: int = 0
    freed: int = 0  # when it was given back, as a count

    def shared(self, prompt: np.ndarray, drafts: bool) -> int:
        """How many first tokens of `prompt` need not be read again. At least one always is, for its logits."""
        size = min(len(self.tokens), len(prompt))
        apart = np.flatnonzero(self.tokens[:size] != prompt[:size])
        equal = int(apart[0]) if len(apart) else size
        usable = min(equal - 1, self.draft_read) if drafts else equal
        return max(0, min(usable, len(prompt) - 1))


class SlotCache:
    """The free slots. drafts: whether there is a draft, whose cache must hold a prefix as well."""

    def __init__(self, slots: int, drafts: bool, reuse: bool):
        self._free = [Slot(row) for row in range(slots)]
        self._drafts, self._reuse, self._given_back = drafts, reuse, 0

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, prompt: Sequence[int]) -> tuple[Slot, int]:
        """The free slot with the longest common prefix, among equals the one freed first; and the prefix's length."""
        wanted = np.asarray(prompt, np.int32)
        shared = [slot.shared(wanted, self._drafts) if self._reuse else 0 for slot in self._free]
        best = max(range(len(shared)), key=lambda i: (shared[i], -self._free[i].freed))
        return self._free.pop(best), shared[best]

    def give_back(self, slot: Slot, tokens: Sequence[int], draft_read: int) -> None:
        """Frees a slot whose caches hold these tokens, and the draft's the first `draft_read` of them."""
        self._given_back += 1
        slot.tokens, slot.draft_read, slot.freed = np.asarray(tokens, np.int32), draft_read, self._given_back
        self._free.append(slot)


def bytes_per_token(target: Target, draft: Draft | None) -> tuple[int, int]:
    """Bytes of keys and values of one token: in the target's cache, and in the draft's (0 without one)."""
    own = _bytes(target.config, target.dtype)
    return own, 0 if draft is None else _bytes(draft.config.decoder, draft.params["lm_head"]["weight"].dtype)


def _bytes(decoder: DecoderConfig, dtype) -> int:
    return 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * np.dtype(dtype).itemsize


def slots_for(memory: int, max_len: int, target: Target, draft: Draft | None) -> int:
    """How many slots of max_len tokens fit into so many bytes; UserError if none does."""
    slot = max_len * sum(bytes_per_token(target, draft))
    if memory < slot:
        raise UserError(
            f"{memory / 2**20:.0f} MiB for keys and values / a slot of {max_len} tokens takes {slot / 2**20:.1f} MiB / "
            f"allow more memory or shorten --max-len"
        )
    return memory // slot

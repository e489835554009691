"""The cache manager: which slot a request gets, what of its prompt need not be read, and what all of it costs.

A slot is one row of every key/value cache, of target and draft. A freed slot keeps its entries, and a prompt that
begins with the same tokens as any slot's text, free or busy, is read from where they part. Entry i of the target
depends on tokens 0..i, entry i of the draft on token i + 1 as well (it pairs the features of token i with the embedding
of the next), so the draft can keep one entry less than the target; and to go on, it needs the features of the last
token kept, which only reading that token gives. Hence p equal tokens spare p - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.target import Target

_WORTH_A_COPY = 16  # tokens: a copy moves the caches of a whole slot, about as long as reading so many takes


@dataclass(eq=False)
class Slot:
    """row: in the caches. text: prompt and answer. read, draft_read: how many tokens of it have right entries in the
    target's cache and in the draft's. freed: when it was given back, as a count."""

    row: int
    text: list[int] = field(default_factory=list)
    read: int = 0
    draft_read: int = 0
    busy: bool = False
    freed: int = 0

    def commit(self, tokens: Sequence[int], draft_lag: int) -> None:
        """Adds new tokens, of which the target has read all but the newest, the draft `draft_lag` less."""
        self.text += tokens
        self.read = len(self.text) - 1
        self.draft_read = self.read - draft_lag

    def forget(self) -> None:
        """The entries are not to be used again."""
        self.read = self.draft_read = 0


class Place(NamedTuple):
    """Where a prompt goes: a slot that has `slot.read` of its tokens once row `copy_from`, if any, is copied to it."""

    slot: Slot
    copy_from: int | None


class SlotCache:
    """All slots. drafts: whether there is a draft, whose cache must hold a prefix as well. queries, hits: tokens of all
    prompts that got a slot, and of these those that need not be read."""

    def __init__(self, slots: int, drafts: bool, reuse: bool):
        self._slots = [Slot(row) for row in range(slots)]
        self._drafts, self._reuse, self._given_back = drafts, reuse, 0
        self.queries = self.hits = 0

    @property
    def free(self) -> list[Slot]:
        """Slots without a request, the one freed first in front."""
        return sorted((slot for slot in self._slots if not slot.busy), key=lambda slot: slot.freed)

    @property
    def tokens(self) -> int:
        """Entries in use."""
        return sum(slot.read for slot in self._slots if slot.busy)

    def take(self, prompt: Sequence[int]) -> Place:
        """A free slot for a prompt, with as much of it as is worth having of what slots hold.

        The free slot that holds most, if little else is in it; otherwise the one freed first, to which the prefix is
        copied from any slot.
        """
        chosen, source, shared = self.free[0], None, 0
        if self._reuse:
            wanted = np.asarray(prompt, np.int32)
            counts = {slot: self._shared(slot, wanted) for slot in self._slots}
            # Among equals one that is free, for nothing need be copied; of these the one of which least is lost.
            best = max(self._slots, key=lambda slot: (counts[slot], not slot.busy, -slot.read))
            if not best.busy and 2 * counts[best] >= best.read:
                chosen = best
            shared = counts[chosen]
            if counts[best] >= shared + _WORTH_A_COPY:
                source, shared = best.row, counts[best]
        chosen.text, chosen.read, chosen.draft_read, chosen.busy = list(prompt), shared, shared, True
        self.queries, self.hits = self.queries + len(prompt), self.hits + shared
        return Place(chosen, source)

    def awaits(self, prompt: Sequence[int]) -> bool:
        """Whether a slot will soon hold much more of a prompt than any does now: its own, which begins in the same way,
        is being read."""
        reading = [slot for slot in self._slots if slot.busy and len(slot.text) - slot.read >= _WORTH_A_COPY]
        if not (self._reuse and reading):
            return False
        wanted = np.asarray(prompt, np.int32)
        now = max(self._shared(slot, wanted) for slot in self._slots)
        soon = [self._usable(slot, wanted, len(slot.text), len(slot.text)) for slot in reading]
        return any(then - max(now, slot.read) >= _WORTH_A_COPY for slot, then in zip(reading, soon, strict=True))

    def _shared(self, slot: Slot, prompt: np.ndarray) -> int:
        """How many first tokens of `prompt` need not be read again."""
        return self._usable(slot, prompt, slot.read, slot.draft_read)

    def _usable(self, slot: Slot, prompt: np.ndarray, read: int, draft_read: int) -> int:
        """The same with so much of a slot's text in the caches. At least one token is read, for its logits."""
        size = min(read, len(prompt))
        apart = np.flatnonzero(np.asarray(slot.text[:size], np.int32) != prompt[:size])
        equal = int(apart[0]) if len(apart) else size
        usable = min(equal - 1, draft_read) if self._drafts else equal
        return max(0, min(usable, len(prompt) - 1))

    def give_back(self, slot: Slot) -> None:
        self._given_back += 1
        slot.busy, slot.freed = False, self._given_back


def bytes_per_token(target: Target, draft: Draft | None) -> tuple[int, int]:
    """Bytes of keys and values of one token: in the target's cache, and in the draft's (0 without one)."""
    own = _bytes(target.config, target.dtype)
    return own, 0 if draft is None else _bytes(draft.config.decoder, draft.params["lm_head"]["weight"].dtype)


def _bytes(decoder: DecoderConfig, dtype) -> int:
    key_and_value = decoder.head_dim + (decoder.value_dim or decoder.head_dim)
    return decoder.num_layers * decoder.num_kv_heads * key_and_value * np.dtype(dtype).itemsize


def slots_for(memory: int, entries: int, target: Target, draft: Draft | None) -> int:
    """How many slots of so many entries fit into so many bytes; UserError if none does."""
    slot = entries * sum(bytes_per_token(target, draft))
    if memory < slot:
        raise UserError(
            f"{memory / 2**20:.0f} MiB for keys and values / a slot of {entries} tokens takes {slot / 2**20:.1f} MiB "
            f"/ allow more memory or shorten --max-len"
        )
    return memory // slot

"""Prompts written by the target itself, where no prompts are at hand.

A chat model that reads only the header of a user turn goes on with what users ask: its own picture of its users. The
prompts are sampled, filtered and written as JSONL rows {"turns": [text]}.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3_jax.data.answers import require_same_facts, write_facts
from eagle3_jax.errors import UserError
from eagle3_jax.files import write_whole
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.slots import Request, generate_many

_SENTINEL = "SENTINEL"
_TEMPERATURE, _TOP_P = 1.0, 0.95
_MIN_TOKENS, _MAX_TOKENS = 3, 120
_SAMPLES_A_PROMPT = 10  # give up when fewer than one in ten samples can be used


def user_header_ids(tokenizer: Any) -> list[int]:
    """Ids of all the chat template writes before the content of a first user message (system prompt included).

    Raises UserError if there is no chat template, or if it gives no such header.
    """
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template, so no user turn can be begun / give --prompts instead")
    message = {"role": "user", "content": _SENTINEL}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=False)
    header, found, _ = text.partition(_SENTINEL)
    # A blank at the end of the header would be a token of its own; in running text it belongs to the next word.
    header = header.rstrip(" ")
    if not found or not header:
        raise UserError("the chat template writes nothing before a user's message / give --prompts instead")
    return tokenizer(header, add_special_tokens=False, verbose=False)["input_ids"]


def write_self_prompts(
    target: Target, count: int, out: Path, seed: int, slots: int, progress: Callable[[int, int], None]
) -> None:
    """Writes `count` prompts to `out`, atomically; does nothing if it holds them already.

    progress(kept, sampled) is called after every sample. Raises UserError if `out` was written with another count, seed
    or target, cannot be written, or if too few samples can be used.
    """
    facts = {"target": target.fingerprint["hash"], "count": count, "seed": seed}
    if out.exists():
        require_same_facts(out, facts)
        return
    prompts = sample_prompts(target, count, seed, slots, progress)
    rows = [json.dumps({"turns": [prompt]}, ensure_ascii=False) + "\n" for prompt in prompts]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_facts(out, facts)
        write_whole(out, "".join(rows))
    except OSError as error:
        raise UserError(f"cannot write prompts / {out} / {error.strerror or error}") from error


def sample_prompts(
    target: Target, count: int, seed: int, slots: int, progress: Callable[[int, int], None]
) -> list[str]:
    """`count` different user messages in the target's own words; the same for the same seed.

    Raises UserError when 10 * count samples gave fewer.
    """
    tokenizer, header = target.require_tokenizer(), user_header_ids(target.require_tokenizer())
    if not target.eos_token_ids:
        raise UserError(f"the target names no end token, so a user turn never ends / {target.path} / give --prompts")
    # Sample i uses seed base + i, and all begin with the same ids: with base = seed, seeds 0 and 1 would share samples.
    base = int.from_bytes(hashlib.sha256(f"self-prompts {seed}".encode()).digest()[:4])
    kept: dict[str, str] = {}
    sampled = 0
    while len(kept) < count:
        wave = min(max(count - len(kept), slots), _SAMPLES_A_PROMPT * count - sampled)
        if wave == 0:
            raise UserError(
                f"only {len(kept)} of {count} prompts came out of {sampled} samples / ask for fewer, or give --prompts"
            )
        requests = [Request(i, header) for i in range(sampled, sampled + wave)]
        finished = generate_many(target, requests, len(header), _MAX_TOKENS, slots, _TEMPERATURE, _TOP_P, base)
        usable = {}
        for done, request in enumerate(finished, start=1):
            if text := usable_prompt(tokenizer, request.tokens, target.eos_token_ids):
                usable[request.index] = text
            progress(min(len(kept) + len(usable), count), sampled + done)
        # In the order of the samples, not of finishing, which depends on the number of slots.
        for index in sorted(usable):
            kept.setdefault(_key(usable[index]), usable[index])
        sampled += wave
    return list(kept.values())[:count]


def usable_prompt(tokenizer: Any, tokens: list[int], end_tokens: tuple[int, ...]) -> str | None:
    """The text of a sampled user turn, or None if it was cut, is very short, or is not plain text with words in it."""
    content = tokens[:-1]
    if tokens[-1] not in end_tokens or len(content) < _MIN_TOKENS:
        return None
    text = tokenizer.decode(content, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if text != tokenizer.decode(content, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        return None  # a special token inside: the model wrote a header or began another turn
    printable = all(c.isprintable() or c in "\n\t" for c in text) and "\N{REPLACEMENT CHARACTER}" not in text
    return text.strip() if printable and any(c.isalpha() for c in text) else None


def _key(text: str) -> str:
    """Prompts that differ only in case, blanks or punctuation are the same prompt."""
    return "".join(c for c in text.casefold() if c.isalnum())

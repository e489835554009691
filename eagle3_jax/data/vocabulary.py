"""The draft vocabulary: which target ids the draft head can predict, and the maps between both numberings.

In memory a map is `absolute`: int32[Vd] target ids. On disk it is the ecosystem's pair `d2t` (int64[Vd], *offsets*:
target id = draft id + d2t[draft id]) and `t2d` (bool[V], target id is in the draft vocabulary).
"""

from collections.abc import Iterable

import numpy as np

from eagle3_jax.data.template import Document
from eagle3_jax.errors import UserError


def draft_vocabulary(
    documents: Iterable[Document], size: int, vocab_size: int, always: Iterable[int] = ()
) -> np.ndarray:
    """Returns int32[size] target ids, ascending: the most frequent supervised tokens of (ids, mask) documents.

    Ties go to the smaller id; `always` (the end tokens) are in whatever their count; if there are fewer distinct
    tokens, the smallest unused ids fill up. `size == vocab_size` is the identity and needs no documents. Raises
    UserError for sizes outside 1..vocab_size, `always` ids that are out of range or too many, and no supervised token.
    """
    if not 1 <= size <= vocab_size:
        raise UserError(f"draft vocabulary size {size} is outside 1..{vocab_size}, the target's vocabulary")
    if size == vocab_size:
        return np.arange(vocab_size, dtype=np.int32)
    forced = np.unique(np.asarray(list(always), dtype=np.int64))
    if forced.size and not (forced[0] >= 0 and forced[-1] < vocab_size):
        raise UserError(f"end tokens {forced.tolist()} are not all in 0..{vocab_size - 1}, the target's vocabulary")
    if forced.size > size:
        raise UserError(f"draft vocabulary size {size} cannot hold the {forced.size} end tokens; raise it")
    counts = _supervised_counts(documents, vocab_size)
    if not counts.any():
        raise UserError("no supervised token to count, so no draft vocabulary can be chosen; check the loss masks")
    by_frequency = np.lexsort((np.arange(vocab_size), -counts))  # ids never seen come last, smallest first
    rest = by_frequency[~np.isin(by_frequency, forced)]
    return np.sort(np.concatenate([forced, rest[: size - forced.size]])).astype(np.int32)


def to_offsets(absolute: np.ndarray) -> np.ndarray:
    """d2t as stored in checkpoints: int64[Vd] offsets of int[Vd] absolute target ids."""
    return np.asarray(absolute, dtype=np.int64) - np.arange(len(absolute))


def to_absolute(d2t_offsets: np.ndarray) -> np.ndarray:
    """int32[Vd] absolute target ids of int[Vd] stored offsets (in any order: ModelOpt does not sort)."""
    return (np.asarray(d2t_offsets, dtype=np.int64) + np.arange(len(d2t_offsets))).astype(np.int32)


def t2d(absolute: np.ndarray, vocab_size: int) -> np.ndarray:
    """t2d as stored in checkpoints: bool[vocab_size], true for the ids in `absolute`."""
    member = np.zeros(vocab_size, dtype=bool)
    member[absolute] = True
    return member


def check_map(d2t_offsets: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> None:
    """Raises UserError unless `d2t_offsets` (int[Vd]) maps to distinct ids in 0..vocab_size-1 that agree with `t2d`.

    `t2d` is bool[vocab_size], or None where a format has none (ModelOpt). A map of absolute ids in place of offsets,
    which would silently decode to wrong tokens, is refused: for certain with `t2d`, else where it leaves the range,
    repeats an id, or is exactly 0, 1, 2, ... (an absolute identity).
    """
    offsets = np.asarray(d2t_offsets)
    if offsets.ndim != 1 or not np.issubdtype(offsets.dtype, np.integer) or not 1 <= offsets.size <= vocab_size:
        raise UserError(
            f"d2t is {offsets.dtype}{list(offsets.shape)}; expected 1 to {vocab_size} integers, one per draft token"
        )
    offsets = offsets.astype(np.int64)
    absolute = offsets + np.arange(offsets.size)
    hint = ""
    if offsets.size > 1 and offsets.min() >= 0 and offsets.max() < vocab_size and _distinct(offsets):
        hint = (
            "; its values look like absolute target ids, but d2t holds offsets (target id = draft id + d2t[draft id]): "
            "subtract arange(len(d2t))"
        )
    outside = np.flatnonzero((absolute < 0) | (absolute >= vocab_size))
    if outside.size:
        i = outside[0]
        raise UserError(f"d2t maps draft id {i} to target id {absolute[i]}, outside 0..{vocab_size - 1}{hint}")
    if not _distinct(absolute):
        ids, counts = np.unique(absolute, return_counts=True)
        raise UserError(f"d2t maps {counts.max()} draft ids to the same target id {ids[counts.argmax()]}{hint}")
    if t2d is not None:
        _check_against(np.asarray(t2d), absolute, vocab_size, hint)
    elif hint and np.array_equal(offsets, np.arange(offsets.size)):
        raise UserError(f"d2t is 0, 1, 2, ... {offsets.size - 1}{hint}, or supply t2d")


def coverage(documents: Iterable[Document], absolute: np.ndarray) -> float:
    """Share of the supervised tokens of (ids, mask) documents that `absolute` contains. UserError if there are none."""
    inside = total = 0
    for ids, mask in documents:
        supervised = _supervised(ids, mask)
        inside += int(np.isin(supervised, absolute).sum())
        total += supervised.size
    if not total:
        raise UserError(
            "no supervised token, so the coverage of the draft vocabulary is undefined; check the loss masks"
        )
    return inside / total


def _supervised(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return ids[mask.astype(bool)]  # a 0/1 integer mask would index, not select


def _supervised_counts(documents: Iterable[Document], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids, mask in documents:
        counts += np.bincount(_supervised(ids, mask), minlength=vocab_size)
    return counts


def _check_against(member: np.ndarray, absolute: np.ndarray, vocab_size: int, hint: str) -> None:
    if member.shape != (vocab_size,):
        raise UserError(f"t2d has shape {list(member.shape)}; expected [{vocab_size}], one entry per target token")
    given, mapped = np.flatnonzero(member), np.sort(absolute)
    if not np.array_equal(given, mapped):
        difference = np.setxor1d(given, mapped)
        raise UserError(
            f"d2t and t2d disagree on {difference.size} target ids (first {difference[0]}): "
            f"d2t names {mapped.size} ids, t2d {given.size}{hint}"
        )


def _distinct(values: np.ndarray) -> bool:
    return np.unique(values).size == values.size

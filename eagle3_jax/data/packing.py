"""Packing documents into rows of one length, first fit decreasing, with an account of what was cut or left out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle3_jax.data.template import Document
from eagle3_jax.errors import UserError

PADDING = -1


@dataclass(frozen=True)
class PackingReport:
    """Counts of one packing run; `supervised_tokens` are those kept, `lost_supervised_tokens` those cut off.

    dropped_documents: left out because nothing supervised is left of them (`unsupervised_documents` of these had
    nothing supervised to begin with) or because they are too long; cut_documents: longer than a row and cut.
    """

    documents: int
    rows: int
    supervised_tokens: int
    lost_supervised_tokens: int
    cut_documents: int
    dropped_documents: int
    unsupervised_documents: int
    overlong_documents: int
    fill_rate: float


@dataclass(frozen=True)
class Packed:
    """Rows of N x L: `input_ids` int32 (0 where padded), `loss_mask` bool, `document_ids` int32.

    Documents of a row are numbered 0, 1, ... in `document_ids`, each is contiguous; -1 is padding, at the end only.
    members[r] are their places in the list that was packed.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    document_ids: np.ndarray
    members: list[list[int]]
    report: PackingReport


def pack(documents: Sequence[Document], length: int, drop_overlong: bool = False) -> Packed:
    """Packs (ids int[T], mask bool[T]) documents into rows of `length`, deterministically.

    Longer documents are cut at `length`, or left out with `drop_overlong`; documents without a supervised token (left)
    are left out; all are counted.
    Rows come out ordered by their longest document: shuffle them before training. Raises UserError if `length` is
    under 2 or no document has a supervised token left.
    """
    if length < 2:
        raise UserError(f"packing length {length} is too short; it must be at least 2")
    overlong = {i for i, (ids, _) in enumerate(documents) if len(ids) > length}
    left_out = overlong if drop_overlong else set()
    kept = [i for i, (_, mask) in enumerate(documents) if mask[:length].any() and i not in left_out]
    if left_out and not kept:
        raise UserError(
            f"nothing to train on: documents longer than {length} tokens are left out, no other is supervised"
        )
    if not kept:
        raise UserError(
            f"nothing to train on: none of {len(documents)} documents has a supervised token in its first {length} "
            "tokens; check that there are assistant turns, the chat template, and the length"
        )
    lengths = {i: min(len(documents[i][0]), length) for i in kept}
    rows = _first_fit_decreasing(lengths, length)

    input_ids = np.zeros((len(rows), length), dtype=np.int32)
    loss_mask = np.zeros((len(rows), length), dtype=bool)
    document_ids = np.full((len(rows), length), PADDING, dtype=np.int32)
    for r, row in enumerate(rows):
        position = 0
        for number, i in enumerate(row):
            ids, mask = documents[i]
            span = slice(position, position + lengths[i])
            input_ids[r, span] = ids[:length]
            loss_mask[r, span] = mask[:length]
            document_ids[r, span] = number
            position = span.stop

    supervised = int(loss_mask.sum())
    report = PackingReport(
        documents=len(documents),
        rows=len(rows),
        supervised_tokens=supervised,
        lost_supervised_tokens=sum(int(mask.sum()) for _, mask in documents) - supervised,
        cut_documents=len(overlong - left_out),
        dropped_documents=len(documents) - len(kept),
        unsupervised_documents=sum(not mask.any() for _, mask in documents),
        overlong_documents=len(left_out),
        fill_rate=float((document_ids != PADDING).mean()),
    )
    return Packed(input_ids, loss_mask, document_ids, rows, report)


def _first_fit_decreasing(lengths: dict[int, int], capacity: int) -> list[list[int]]:
    """Longest first (ties: first given first), each into the first row with room."""
    rows: list[list[int]] = []
    free = np.full(len(lengths), capacity)  # one entry per possible row, so that the first fit always exists
    for i in sorted(lengths, key=lambda i: (-lengths[i], i)):
        r = int(np.argmax(free[: len(rows) + 1] >= lengths[i]))
        if r == len(rows):
            rows.append([])
        rows[r].append(i)
        free[r] -= lengths[i]
    return rows

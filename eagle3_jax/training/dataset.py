"""From files to batches: read, tokenise, pack, choose the draft vocabulary, and a repeatable order of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3_jax.data import foreign
from eagle3_jax.data.foreign import identify
from eagle3_jax.data.foreign.masks import with_masks
from eagle3_jax.data.foreign.sample import Sample
from eagle3_jax.data.packing import Packed, pack
from eagle3_jax.data.records import Conversation, read_records
from eagle3_jax.data.template import Document, tokenise
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.training.step import Batch


@dataclass(frozen=True)
class Documents:
    """Tokenised records of one or more files; `refused` counts rows whose borders do not survive tokenisation.

    samples: of each item its stored features, where that is what the files hold.
    """

    items: list[Document]
    refused: int
    first_refusal: str | None
    samples: list[Sample] | None = None


def read_documents(files: str | list[str], target: Target, loss_masks: str | None = None) -> Documents:
    """Reads and tokenises training files, or opens stored features (tokens and masks; states stay on disk).

    Rows that cannot be masked exactly are left out and counted; nothing is left out of stored features. loss_masks: see
    config.StoredConfig.
    Raises UserError for unreadable files, conversations without a tokenizer, JSONL and stored features in one list, or
    if more than a tenth of the rows had to be left out.
    """
    files = [files] if isinstance(files, str) else files
    kinds = {foreign.is_stored(file) for file in files}
    if len(kinds) > 1:
        raise UserError(f"JSONL and stored features in one list / {', '.join(files)} / train on one kind")
    if kinds == {True}:
        return _stored_documents(files, target, loss_masks)
    records = [r for file in files for r in read_records(Path(file))]
    chats = any(isinstance(record, Conversation) for record in records)
    tokenizer = target.require_tokenizer() if chats else None
    items, refusals = [], []
    for record in records:
        try:
            items.append(tokenise(tokenizer, record, target.config.vocab_size))
        except UserError as error:
            refusals.append(str(error))
    if len(refusals) > 0.1 * len(records):
        raise UserError(f"{len(refusals)} of {len(records)} rows cannot be used / first: {refusals[0]}")
    return Documents(items, len(refusals), refusals[0] if refusals else None)


def _stored_documents(files: list[str], target: Target, loss_masks: str | None) -> Documents:
    samples = [foreign.open_sample(path) for file in files for path in foreign.sample_files(file)]
    for sample in samples:
        identify.check_fits(sample, target)
    samples = with_masks(samples, loss_masks)
    return Documents([(sample.input_ids, sample.loss_mask) for sample in samples], 0, None, samples)


def pack_documents(documents: list[Document], length: int, where: str | list[str]) -> Packed:
    try:
        return pack(documents, length)
    except UserError as error:
        raise UserError(f"{error} / {where}") from error


def steps_an_epoch(packed: Packed, batch_rows: int) -> int:
    return -(-len(packed.input_ids) // batch_rows)


def rows_of_step(step: int, rows: int, batch_rows: int, seed: int, pass_steps: int | None = None) -> list[int]:
    """Row numbers of optimiser step `step` (from 0): every row once a pass, shuffled anew for each pass.

    pass_steps: steps of a pass if it is shorter than all rows; the rows are then those of the first pass. A function of
    its arguments alone, so that a resumed run sees exactly the rows it would have seen.
    """
    passed, place = divmod(step, pass_steps or -(-rows // batch_rows))
    order = np.random.default_rng([seed, 0]).permutation(rows)[
        : None if pass_steps is None else pass_steps * batch_rows
    ]
    if passed:
        order = np.random.default_rng([seed, passed]).permutation(order)
    return order[place * batch_rows : (place + 1) * batch_rows].tolist()


def make_batch(packed: Packed, rows: list[int], batch_rows: int) -> Batch:
    """The rows as a batch, filled up with padding rows so that the shape never changes."""
    missing = batch_rows - len(rows)

    def take(array: np.ndarray, fill) -> np.ndarray:
        return np.concatenate([array[rows], np.full((missing, array.shape[1]), fill, array.dtype)])

    return Batch(take(packed.input_ids, 0), take(packed.loss_mask, False), take(packed.document_ids, -1))


def batches_in_order(packed: Packed, batch_rows: int) -> Iterator[tuple[list[int], Batch]]:
    """All rows once, in file order; for evaluation."""
    for begin in range(0, len(packed.input_ids), batch_rows):
        rows = list(range(begin, min(begin + batch_rows, len(packed.input_ids))))
        yield rows, make_batch(packed, rows, batch_rows)

"""From files to batches: read, tokenise, pack, choose the draft vocabulary, and a repeatable order of rows."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from eagle3_jax.data import foreign, store
from eagle3_jax.data.foreign import identify
from eagle3_jax.data.foreign.masks import with_masks
from eagle3_jax.data.foreign.sample import Sample
from eagle3_jax.data.packing import Packed, pack
from eagle3_jax.data.records import Record, TokenRow, read_records
from eagle3_jax.data.template import DEFAULT, ChatOptions, Document, check_variables, tokenise
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.sharding import shared
from eagle3_jax.training.step import Batch


@dataclass(frozen=True)
class Documents:
    """Tokenised records of one or more files, of each its source (the record's `source` key, or the file's name).

    refused: rows whose borders do not survive tokenisation. duplicates: documents that say the same as an earlier one;
    `dropped` of them are not among the items. samples: of each item its stored features, where that is what the files
    hold.
    """

    items: list[Document]
    sources: list[str]
    refused: int = 0
    first_refusal: str | None = None
    duplicates: int = 0
    dropped: int = 0
    samples: list[Sample] | None = None

    def words(self) -> str:
        """The counts that a user should look at, in one line."""
        return f"{self.duplicates} duplicates{' dropped' if self.dropped else ''}, {self.refused} rows refused" + (
            f" (first: {self.first_refusal})" if self.first_refusal else ""
        )


def read_documents(
    files: str | list[str],
    target: Target,
    loss_masks: str | None = None,
    options: ChatOptions = DEFAULT,
    drop_duplicates: bool = False,
) -> Documents:
    """Reads and tokenises training files, or opens stored features (tokens and masks; states stay on disk).

    Rows that cannot be masked exactly are left out and counted. loss_masks: see config.StoredConfig.
    Raises UserError for unreadable files, conversations without a tokenizer, records and stored features in one list,
    or if more than a tenth of the rows had to be left out.
    """
    files = [files] if isinstance(files, str) else files
    kinds = {foreign.is_stored(file) for file in files}
    if len(kinds) > 1:
        raise UserError(f"JSONL and stored features in one list / {', '.join(files)} / train on one kind")
    if kinds == {True}:
        return _stored_documents(files, target, loss_masks, options, drop_duplicates)
    records = [r for file in files for r in read_records(file)]
    rows = [record for record in records if isinstance(record, TokenRow)]
    if rows and options.last_turn_only:
        raise UserError(f"{rows[0].where}: a row of input_ids comes with its loss_mask / leave last_turn_only out")
    tokenizer = target.require_tokenizer() if len(rows) < len(records) else target.tokenizer
    if tokenizer is not None:
        check_variables(tokenizer, options)

    def tokenised(record: Record) -> list[Document] | str:
        try:
            return tokenise(tokenizer, record, target.config.vocab_size, options)
        except UserError as error:
            return str(error)

    items, sources, refusals = [], [], []
    for record, documents in zip(records, shared(tokenised, records, ", ".join(files)), strict=True):
        if isinstance(documents, str):
            refusals.append(documents)
            continue
        items += documents
        sources += [record.source] * len(documents)
    if len(refusals) > 0.1 * len(records):
        raise UserError(f"{len(refusals)} of {len(records)} rows cannot be used / first: {refusals[0]}")
    found = Documents(items, sources, len(refusals), refusals[0] if refusals else None)
    return _with_duplicates_counted(found, drop_duplicates)


def _with_duplicates_counted(found: Documents, drop: bool) -> Documents:
    """The same, its duplicates left out with `drop`."""
    seen, kept = set(), []
    for i, (ids, mask) in enumerate(found.items):
        known = hashlib.sha256(ids.tobytes() + mask.tobytes()).digest()
        if known not in seen:
            kept.append(i)
        seen.add(known)
    duplicates = len(found.items) - len(kept)
    if not drop:
        return replace(found, duplicates=duplicates)
    samples = None if found.samples is None else [found.samples[i] for i in kept]
    items, sources = [found.items[i] for i in kept], [found.sources[i] for i in kept]
    return replace(found, items=items, sources=sources, samples=samples, duplicates=duplicates, dropped=duplicates)


def _stored_documents(
    files: list[str], target: Target, loss_masks: str | None, options: ChatOptions, drop_duplicates: bool
) -> Documents:
    if options.last_turn_only:
        raise UserError(f"stored features come with their masks / {', '.join(files)} / leave last_turn_only out")
    samples, template = [], dict(options.template)
    for file in files:
        if store.is_store(file):
            opened = store.FeatureStore(file)
            opened.require_target(target.fingerprint, target.tokenizer_fingerprint, target.path)
            if (rendered := opened.facts.get("chat_template", {})) != template:
                raise UserError(
                    f"chat_template is {template}, the store was made with {rendered} / {file} / set it to that, or "
                    "make the store anew with the same --chat-template"
                )
            samples += opened.samples()
        else:
            samples += [foreign.open_sample(path) for path in foreign.sample_files(file)]
    for sample in samples:
        identify.check_fits(sample, target)
    samples = with_masks(samples, loss_masks)
    items = [(sample.input_ids, sample.loss_mask) for sample in samples]
    sources = [sample.path.parent.name for sample in samples]
    return _with_duplicates_counted(Documents(items, sources, samples=samples), drop_duplicates)


def pack_documents(
    documents: list[Document], length: int, where: str | list[str], drop_overlong: bool = False
) -> Packed:
    try:
        return pack(documents, length, drop_overlong)
    except UserError as error:
        raise UserError(f"{error} / {where}") from error


def data_warnings(documents: Documents, packed: Packed, heldout: Documents, context: int) -> list[str]:
    """What is likely a mistake in the data, in words. context: tokens of a document that the target is made for."""
    report, warnings = packed.report, []
    if report.unsupervised_documents > 0.1 * report.documents:
        warnings.append(
            f"{report.unsupervised_documents} of {report.documents} documents have nothing supervised / does the chat "
            "template fit the data? / eagle3 data preview shows it"
        )
    length = packed.input_ids.shape[1]
    beyond = sum(min(len(ids), length) > context for ids, _ in (*documents.items, *heldout.items))
    if beyond:
        warnings.append(
            f"{beyond} documents are longer than the target's context of {context} tokens / lower data.length to it"
        )
    seen = {ids.tobytes() for ids, _ in documents.items}
    leaked = sum(ids.tobytes() in seen for ids, _ in heldout.items)
    if leaked:
        warnings.append(
            f"{leaked} of {len(heldout.items)} held-out documents are also in the training data, so held-out figures "
            "are too good"
        )
    return warnings


def steps_an_epoch(packed: Packed, batch_rows: int) -> int:
    return -(-len(packed.input_ids) // batch_rows)


def rows_of_step(step: int, rows: int, batch_rows: int, seed: int, pass_steps: int | None = None) -> list[int]:
    """Row numbers of optimiser step `step` (from 0), see `rows_of_pass`. A function of its arguments alone, so that a
    resumed run sees exactly the rows it would have seen."""
    passed, place = divmod(step, pass_steps or -(-rows // batch_rows))
    order = rows_of_pass(passed, rows, batch_rows, seed, pass_steps)
    return order[place * batch_rows : (place + 1) * batch_rows].tolist()


def rows_of_pass(number: int, rows: int, batch_rows: int, seed: int, pass_steps: int | None = None) -> np.ndarray:
    """Row numbers of a pass (from 0) in its order: every row once, shuffled anew for each pass.

    pass_steps: steps of a pass if it is shorter than all rows; the rows are then those of the first pass.
    """
    first = np.random.default_rng([seed, 0]).permutation(rows)
    first = first if pass_steps is None else first[: pass_steps * batch_rows]
    return np.random.default_rng([seed, number]).permutation(first) if number else first


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

"""Loss masks that lie apart from the features: JSONL rows, or the Hugging Face dataset of speculators 0.5 and later.

A mask belongs to the tokens, so it is looked up by them: a file whose tokens are in no row is refused.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.data.foreign.sample import Sample, read_ids, read_mask
from eagle3_jax.data.records import TokenRow, read_records
from eagle3_jax.errors import UserError


def with_masks(samples: list[Sample], loss_masks: str | None) -> list[Sample]:
    """The samples, each with a mask: its own, or that of the row with its tokens.

    loss_masks: JSONL of {input_ids, loss_mask} or a dataset folder; None looks for the dataset of which a sample's
    folder is part. Raises UserError where a mask is missing or rows disagree, and where both have one.
    """
    bare = [sample for sample in samples if sample.loss_mask is None]
    if not bare:
        if loss_masks is not None:
            raise UserError(f"the files hold loss masks of their own / {samples[0].path} / drop data.stored.loss_masks")
        return samples
    place = Path(loss_masks) if loss_masks is not None else bare[0].path.parent.parent
    if loss_masks is None and not (place / "state.json").exists():
        raise UserError(
            f"the file holds no loss mask / {bare[0].path} / set data.stored.loss_masks to JSONL rows input_ids, "
            "loss_mask or to the dataset folder the features were made from"
        )
    masks = _table(_dataset_rows(place) if place.is_dir() else _jsonl_rows(place))
    return [sample if sample.loss_mask is not None else _with_mask(sample, masks, place) for sample in samples]


def _with_mask(sample: Sample, masks: dict[bytes, np.ndarray], place: Path) -> Sample:
    mask = masks.get(sample.input_ids.tobytes())
    if mask is None:
        raise UserError(f"no row has the {len(sample.input_ids)} tokens of {sample.path} / {place} / find its dataset")
    return dataclasses.replace(sample, loss_mask=mask)


def _table(rows: Iterable[tuple[np.ndarray, np.ndarray, str]]) -> dict[bytes, np.ndarray]:
    masks: dict[bytes, np.ndarray] = {}
    for ids, mask, where in rows:
        if not np.array_equal(masks.setdefault(ids.tobytes(), mask), mask):
            raise UserError(f"two rows have the same tokens and different loss masks / {where} / keep one of them")
    return masks


def _jsonl_rows(path: Path) -> Iterable[tuple[np.ndarray, np.ndarray, str]]:
    for record in read_records(path):
        if not isinstance(record, TokenRow):
            raise UserError(
                f"{record.where}: a conversation has no token ids / loss masks need rows input_ids, loss_mask"
            )
        yield read_ids(record.input_ids, path), np.asarray(record.loss_mask, bool), record.where


def _dataset_rows(folder: Path) -> Iterable[tuple[np.ndarray, np.ndarray, str]]:
    """Rows of a folder of `datasets.Dataset.save_to_disk`: arrow streams named in state.json."""
    try:
        import pyarrow  # an extra: only datasets of speculators need it
    except ImportError as error:
        raise UserError(
            f"reading a Hugging Face dataset needs pyarrow / {folder} / pip install 'eagle3-jax[data]', or give JSONL "
            "rows input_ids, loss_mask as data.stored.loss_masks"
        ) from error
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [folder / entry["filename"] for entry in state["_data_files"]]
        tables: list[tuple[Path, Any]] = []
        for file in files:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                tables.append((file, stream.read_all().select(["input_ids", "loss_mask"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the dataset / {folder} / {' '.join(str(error).split())}") from error
    for file, table in tables:
        for batch in table.to_batches():
            for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
                tokens = read_ids(ids.as_py(), file)
                yield tokens, read_mask(mask.as_py(), len(tokens), file), str(file)

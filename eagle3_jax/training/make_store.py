"""Writing a store of features: the target runs once over the data, and any number of drafts train from its states."""

import datetime
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from eagle3_jax.data.packing import pack
from eagle3_jax.data.store import DTYPES, NAME, VERSION, bytes_a_token, checksum_of, encode
from eagle3_jax.data.template import Document
from eagle3_jax.errors import UserError
from eagle3_jax.files import whole_file, write_whole
from eagle3_jax.models.target import Target
from eagle3_jax.taps import TapSet
from eagle3_jax.training.dataset import batches_in_order
from eagle3_jax.training.features import run_target

SHARD_TOKENS = 1 << 16


def make_store(
    target: Target,
    documents: list[Document],
    taps: TapSet,
    folder: Path,
    dtype: str,
    length: int,
    batch_rows: int = 4,
    shard_tokens: int = SHARD_TOKENS,
    template: Mapping[str, Any] | None = None,
    date: datetime.date | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Writes the states of `documents` (cut at `length`, without those that have nothing supervised left) to `folder`.

    Prints the disk it will take and refuses if that is not free. Killed at any moment, the same call goes on with the
    first shard that is not whole. Returns the index. template: variables of the chat template that the documents were
    rendered with, which training is to state as well; date: the day that it may have written. progress: (shards done,
    shards in all).
    """
    taps.check(target.num_layers)
    if dtype not in DTYPES:
        raise UserError(f"features cannot be stored as {dtype} / choose {' or '.join(DTYPES)}")
    kept = [(ids[:length], mask[:length]) for ids, mask in documents if mask[:length].any()]
    if not kept:
        raise UserError(f"nothing to store: no document has a supervised token in its first {length} tokens")
    size, states = target.config.hidden_size, len(taps) + 1
    facts = {
        "format": NAME,
        "version": VERSION,
        "taps": list(taps),
        "taps_convention": "block-input",
        "last_hidden": "pre-norm",
        "dtype": dtype,
        "hidden_size": size,
        "length": length,
        "target": target.fingerprint["hash"],
        "tokenizer": target.tokenizer_fingerprint,
        "documents": len(kept),
        "text": checksum_of(*(array for document in kept for array in document)),
        "shard_tokens": shard_tokens,
        **({"chat_template": dict(template)} if template else {}),
        **({"date": date.isoformat()} if date else {}),
    }
    shards = _shards([len(ids) for ids, _ in kept], shard_tokens)
    _begin(folder, facts)
    missing = [i for i in range(len(shards)) if not _side_file(folder, i).exists()]
    tokens = sum(len(kept[d][0]) for i in missing for d in shards[i])
    needed, free = tokens * bytes_a_token(states, size, dtype), shutil.disk_usage(folder).free
    say(f"{tokens:,} tokens, {states} states of {size} as {dtype}: {needed / 1e9:.2f} GB of {free / 1e9:.1f} GB free")
    if needed > free:
        raise UserError(f"the store needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free / {folder} / free space")
    for number in missing:
        progress(number, len(shards))
        _write_shard(folder, number, [kept[d] for d in shards[number]], target, taps, dtype, length, batch_rows)
    progress(len(shards), len(shards))
    index = facts | {"shards": [_read_side_file(folder, i) for i in range(len(shards))]}
    _write_json(folder / "index.json", index)
    return index


def _shards(lengths: list[int], tokens: int) -> list[list[int]]:
    """Document numbers of each shard, in order."""
    shards: list[list[int]] = [[]]
    filled = 0
    for i, length in enumerate(lengths):
        if shards[-1] and filled + length > tokens:
            shards.append([])
            filled = 0
        shards[-1].append(i)
        filled += length
    return shards


def begun_on(folder: Path) -> datetime.date | None:
    """The day on which a store was begun, which chat templates may write: today for a new one, None for one of an older
    version, which does not say. UserError if the folder's begun.json is damaged."""
    before = _begun(folder)
    if before is None:
        return datetime.date.today()
    try:
        return datetime.date.fromisoformat(before["date"]) if "date" in before else None
    except (TypeError, ValueError) as error:
        raise UserError(f"begun.json is damaged / {folder} / remove it, or choose another --out") from error


def _begun(folder: Path) -> dict[str, Any] | None:
    """The facts that a store was begun with; None for a new one."""
    begun = folder / "begun.json"
    try:
        before = json.loads(begun.read_text(encoding="utf-8")) if begun.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot make the store / {folder} / {error}") from error
    if not isinstance(before, dict | None):
        raise UserError(f"begun.json is damaged / {folder} / remove it, or choose another --out")
    return before


def _begin(folder: Path, facts: dict[str, Any]) -> None:
    """Makes the folder, or checks that it was begun with the same facts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the store / {folder} / {error}") from error
    before = _begun(folder)
    if before is None:
        _write_json(folder / "begun.json", facts)
    elif before != facts:
        differing = ", ".join(f"{k} {before.get(k)} there, {facts[k]} here" for k in facts if before.get(k) != facts[k])
        raise UserError(f"the store was begun otherwise ({differing}) / {folder} / choose another --out")


def _write_shard(
    folder: Path,
    number: int,
    documents: list[Document],
    target: Target,
    taps: TapSet,
    dtype: str,
    length: int,
    batch_rows: int,
) -> None:
    packed = pack(documents, length)
    found: list[dict[str, np.ndarray] | None] = [None] * len(documents)
    forward = jax.jit(run_target, static_argnums=(0, 1))
    for rows, batch in batches_in_order(packed, batch_rows):
        tapped, last = forward(target.graph, taps, target.params, batch.ids, batch.document_ids)
        arrays = (*tapped.arrays, last.before_norm())
        states = np.stack([np.asarray(jax.device_get(a), np.float32) for a in arrays], axis=2)
        for place, row in enumerate(rows):
            for document, member in enumerate(packed.members[row]):
                found[member] = encode(states[place][batch.document_ids[place] == document], dtype)
    arrays = {key: np.concatenate([document[key] for document in found]) for key in found[0]}
    arrays["input_ids"] = np.concatenate([ids for ids, _ in documents]).astype(np.int32)
    arrays["loss_mask"] = np.concatenate([mask for _, mask in documents]).astype(np.uint8)
    file = folder / f"shard-{number:05}.safetensors"
    try:
        with whole_file(file) as temporary:
            save_file(arrays, temporary)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the shard / {file} / {error} / free space and run again") from error
    sums = [checksum_of(*(document[key] for key in ("states", "scales") if key in document)) for document in found]
    side = {"file": file.name, "lengths": [len(ids) for ids, _ in documents], "checksums": sums}
    _write_json(_side_file(folder, number), side)


def _side_file(folder: Path, number: int) -> Path:
    """Written after its shard: where it is, the shard is whole."""
    return folder / f"shard-{number:05}.json"


def _read_side_file(folder: Path, number: int) -> dict[str, Any]:
    path = _side_file(folder, number)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is damaged ({error}) / {folder} / remove it and run again") from error


def _write_json(path: Path, content: Any) -> None:
    try:
        write_whole(path, json.dumps(content) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path} / {error.strerror or error} / free space and run again") from error

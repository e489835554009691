"""Rows of data files: JSONL (also `.gz`), one JSON list, Parquet, and datasets of the Hugging Face hub.

Every fault is reported with file and row; nothing is skipped, because a skipped row changes what is trained on without
anyone noticing.
"""

import gzip
import json
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.files import parse_json

HUB = "hf:"


def rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number from 1, object) of each row; for JSONL the number of its line. Blank lines are none.

    path: `.jsonl` or `.jsonl.gz` (one object a line; also for other endings), `.json` (a list of objects), `.parquet`,
    or `hf:NAME[/CONFIG][:SPLIT]`, a dataset of the hub (split `train` unless given; needs the extra `data`).
    Raises UserError for a missing, unreadable, torn or empty file, and for what is no object.
    """
    name = str(path)
    if name.startswith(HUB):
        found = _hub_rows(name)
    else:
        _require_file(path)
        suffix = Path(name.removesuffix(".gz")).suffix
        found = {".json": _json_rows, ".parquet": _parquet_rows}.get(suffix, _jsonl_rows)(path)
    empty = True
    for number, row in found:
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: expected an object in each row, found a {type(row).__name__}")
        empty = False
        yield number, row
    if empty:
        raise UserError(f"{path}: the file is empty; expected one object a row")


def is_hub(path: str | Path) -> bool:
    """Whether the name is that of a dataset on the hub."""
    return str(path).startswith(HUB)


def _require_file(path: str | Path) -> None:
    if not os.path.isfile(path):  # which is False for names that are none, too
        raise UserError(f"{path}: {'no regular file' if os.path.exists(path) else 'no such file'}")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: no permission to read it")


def _jsonl_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Lines are split at b"\\n" alone: str.splitlines would also cut at U+2028, legal inside a JSON string."""
    with _open(path) as file:
        for number, raw in enumerate(_guarded(file, path), start=1):
            if raw.strip():
                yield number, _parse(raw, f"{path}:{number}", "JSONL has one object a line")


def _json_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    with _open(path) as file:
        raw = b"".join(_guarded(file, path))
    if not raw.strip():
        return
    try:
        whole = _parse(raw, str(path), "a .json file holds one list of objects")
    except UserError:
        if raw.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            raise
        yield from _jsonl_rows(path)  # JSON lines under this name are common; their faults come with a line
        return
    yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)


def _parse(raw: bytes, where: str, hint: str) -> Any:
    try:
        return parse_json(raw.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except ValueError as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            line = f"line {error.lineno}, " if error.lineno > 1 else ""
            reason = f"{error.msg}, {line}column {error.colno}"
        raise UserError(f"{where}: bad JSON ({reason}); {hint}") from error


def _open(path: str | Path):
    return (gzip.open if str(path).endswith(".gz") else open)(path, "rb")


def _guarded(file, path: str | Path) -> Iterator[bytes]:
    try:
        yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}); write it again or give it another name") from error


def _parquet_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    parquet = _extra("pyarrow.parquet", f"{path} is Parquet")
    from pyarrow import ArrowException

    try:
        file, number = parquet.ParquetFile(path), 0
        columns = file.schema_arrow.names
        if twice := [name for name in columns if columns.count(name) > 1]:
            raise UserError(f"{path}: the column {twice[0]} twice; leave one of them out")
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, _as_json(row)
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # the latter of values Python does not have
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: not a whole Parquet file, or not one of text and numbers ({reason})") from error


def _hub_rows(name: str) -> Iterator[tuple[int, Any]]:
    datasets = _extra("datasets", f"{name} is a dataset of the hub")
    dataset, _, split = name.removeprefix(HUB).partition(":")
    owner, *rest = dataset.split("/")
    parts = ("/".join([owner, *rest[:1]]), *rest[1:])
    try:
        loaded = datasets.load_dataset(*parts, split=split or "train")
    except Exception as error:  # the hub client raises a dozen unrelated types; each becomes one line
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{name}: the hub did not give it ({reason}); the form is hf:NAME[/CONFIG][:SPLIT]") from error
    yield from ((number, _as_json(row)) for number, row in enumerate(loaded, start=1))


def _as_json(value: Any) -> Any:
    """What a table holds, as rows of JSON would have it: an object has no keys for what only others have (null in a
    table), and a map is an object."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return _as_json(dict(value))
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_as_json(item) for item in value]
    return value


def _extra(module: str, why: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{why}, which needs {module.split('.')[0]} / pip install 'eagle3-jax[data]'") from error

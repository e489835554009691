"""Writes files as `torch.save` does (zip layout, protocol 2), without torch: for samples made inside a test."""

import gzip
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

_STORAGE = {
    "float32": "Float",
    "bfloat16": "BFloat16",
    "float16": "Half",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
}


def torch_bytes(value: Any) -> bytes:
    """The content of a file that holds `value`: dicts, lists, tuples, strings, numbers, None and arrays as tensors."""
    storages: list[bytes] = []
    program = b"\x80\x02" + _emit(value, storages) + b"."
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", "little")
        for i, data in enumerate(storages):
            archive.writestr(f"archive/data/{i}", data)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def write_torch(path: Path, value: Any) -> Path:
    """Writes the file, gzipped if its name ends in .gz."""
    content = torch_bytes(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


def _emit(value: Any, storages: list[bytes]) -> bytes:
    """The opcodes that push a value."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    if isinstance(value, str):
        text = value.encode()
        return b"X" + len(text).to_bytes(4, "little") + text
    if isinstance(value, dict):
        return b"}(" + b"".join(_emit(part, storages) for pair in value.items() for part in pair) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(_emit(item, storages) for item in value) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(_emit(item, storages) for item in value) + b"t"
    array = np.ascontiguousarray(value)
    storage = f"ctorch\n{_STORAGE[str(array.dtype)]}Storage\n".encode()
    key = _emit(str(len(storages)), storages)
    storages.append(array.tobytes())
    strides = tuple(step // array.itemsize for step in array.strides)
    identity = b"(" + _emit("storage", storages) + storage + key + _emit("cpu", storages) + _emit(array.size, storages)
    view = _emit(0, storages) + _emit(array.shape, storages) + _emit(strides, storages)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + identity + b"tQ" + view + b"\x89}tR"

"""The header of a GGUF file: metadata and tensor table, checked against the length of the file.

Parsed here because `gguf.GGUFReader` makes a numpy view of every vocabulary entry, which costs seconds per open.
"""

import importlib.util
import math
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from eagle3_jax.errors import UserError

# GGUF value type id -> numpy dtype; 8 is a string and 9 an array.
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """Where one tensor lies. `shape` is in numpy order, so a linear layer is [out, in]; `kind` is a ggml type id."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


class Header(NamedTuple):
    """Everything of a GGUF file but its weights."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def need(self, key: str) -> Any:
        """The metadata value of `key`; UserError if the file lacks it."""
        if key not in self.metadata:
            raise UserError(f"{self.path}: GGUF metadata has no {key}; convert the model again with a newer llama.cpp")
        return self.metadata[key]


def read_header(path: str | os.PathLike) -> Header:
    """Parse metadata and tensor table, and check that the file is long enough to hold every tensor.

    UserError if the file cannot be opened, is not a little-endian GGUF of version 2 or 3, or is truncated.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{path}: reading GGUF needs the gguf package; install the `demo` extra")
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            return _parse(Path(path), file, size)
    except OSError as error:
        raise UserError(f"{path}: cannot read the GGUF file ({error.strerror}); check the path") from error
    except ValueError as error:
        raise UserError(f"{path}: not a usable GGUF file ({error}); download or convert it again") from error


def _parse(path: Path, file: BinaryIO, size: int) -> Header:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if _take(file, size, 4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    version = _number(file, size, "<u4")
    if version not in (2, 3):
        raise ValueError(f"version or byte order not supported: {version:#x}, only little-endian 2 and 3")
    num_tensors, num_keys = _number(file, size, "<u8"), _number(file, size, "<u8")

    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = _strings(file, size, 1)[0]
        if key in metadata:
            raise ValueError(f"key {key} occurs twice")
        metadata[key] = _value(file, size, _number(file, size, "<u4"))

    table: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        name = _strings(file, size, 1)[0]
        if name in table:
            raise ValueError(f"tensor {name} occurs twice")
        rank = _number(file, size, "<u4")
        # ggml lists the fastest-varying dimension first.
        shape = tuple(reversed(np.frombuffer(_take(file, size, 8 * rank), "<u8").tolist()))
        kind = GGMLQuantizationType(_number(file, size, "<u4"))
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name}: shape {list(shape)} does not fit blocks of {block}")
        nbytes = math.prod(shape) // block * block_bytes
        table[name] = TensorInfo(shape, int(kind), _number(file, size, "<u8"), nbytes)

    alignment = int(metadata.get("general.alignment", 32))
    if alignment < 1:
        raise ValueError(f"alignment {alignment}")
    start = -(-file.tell() // alignment) * alignment
    tensors = {name: info._replace(offset=start + info.offset) for name, info in table.items()}
    end = max((info.offset + info.nbytes for info in tensors.values()), default=0)
    if end > size:
        raise ValueError(f"truncated: {size} bytes, its tensors need {end}")
    return Header(path, metadata, tensors)


def _take(file: BinaryIO, size: int, count: int) -> bytes:
    # Checked before reading: in a torn header `count` can be any number, and read(count) would allocate it.
    if count > size - file.tell():
        raise ValueError(f"truncated: {size} bytes end inside the header")
    return file.read(count)


def _number(file: BinaryIO, size: int, dtype: str) -> int:
    return np.frombuffer(_take(file, size, np.dtype(dtype).itemsize), dtype)[0].item()


def _strings(file: BinaryIO, size: int, count: int) -> list[str]:
    # One plain loop: a vocabulary and its merges are 100,000 strings and more, and every open reads them.
    strings = []
    for _ in range(count):
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        text = file.read(min(length, size))
        if len(prefix) < 8 or len(text) < length:
            raise ValueError(f"truncated: {size} bytes end inside the header")
        strings.append(text.decode("utf-8"))
    return strings


def _value(file: BinaryIO, size: int, kind: int) -> Any:
    if kind == _STRING:
        return _strings(file, size, 1)[0]
    if kind in _SCALARS:
        return _shortest(_take(file, size, np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[0]
    if kind != _ARRAY:
        raise ValueError(f"unknown value type {kind}")
    item, count = _number(file, size, "<u4"), _number(file, size, "<u8")
    if item == _STRING:
        return _strings(file, size, count)
    if item not in _SCALARS:
        raise ValueError(f"array of unsupported value type {item}")
    return _shortest(_take(file, size, count * np.dtype(_SCALARS[item]).itemsize), _SCALARS[item])


def _shortest(raw: bytes, dtype: str) -> list:
    # A float32 1e-5 must come out as 1e-5, as config.json has it, and not as 9.999999747378752e-06.
    values = np.frombuffer(raw, dtype)
    return [float(str(value)) for value in values] if dtype == "<f4" else values.tolist()

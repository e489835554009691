"""Tensors in a file of `torch.save`: where they lie in its storages, checked before any memory is asked for."""

import contextlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.errors import UserError

_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = {
    **{name: np.dtype(name) for name in ["float16", "float32", "float64", "complex64", "complex128", "bool"]},
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *_FP8)},
}
_MAX_EXPANDED = 1 << 20  # elements of a tensor that repeats its storage
# What running or resolving a damaged program can raise; MemoryError where a length is damaged.
_TORN = (
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    EOFError,
    OSError,
    RuntimeError,
    MemoryError,
) + (zipfile.BadZipFile, zlib.error)


class Refusal(Exception):
    """The file holds something that is not read, on purpose."""


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Turns whatever a refused or damaged file raises into a UserError that names it."""
    try:
        yield
    except Refusal as error:
        raise UserError(f"{error} / {path} / only tensors, containers and plain values are read") from error
    except _TORN as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"cannot read the file / {path} / {error.strerror}") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        message = f"cannot read it as a file of torch.save / {path} / {reason}; is it torn? copy it again"
        raise UserError(message) from error


@dataclass
class Storage:
    """Raw memory that tensors are views of. read gives its bytes; items is its length in elements of dtype."""

    dtype: np.dtype
    items: int
    read: Callable[[], bytes]
    data: bytes | None = None

    def array(self, dtype: np.dtype) -> np.ndarray:
        if self.data is None:
            self.data = self.read()
        if len(self.data) < self.items * self.dtype.itemsize:
            raise ValueError(f"a storage of {self.items} {self.dtype} has {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype, self.items * self.dtype.itemsize // dtype.itemsize)


@dataclass
class StoredTensor:
    """A tensor in a file: shape and dtype are known, `read()` gives the array (read-only, strided as stored)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    storage: Storage
    offset: int
    strides: tuple[int, ...]
    path: Path = Path()

    def read(self) -> np.ndarray:
        """The array. UserError if its part of the file is damaged or gone."""
        with told(self.path):
            return self._read()

    def _read(self) -> np.ndarray:
        flat = self.storage.array(self.dtype)
        strides = [step * self.dtype.itemsize for step in self.strides]
        # Torch writes anything for the strides of an empty tensor.
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides, writeable=False)


def rebuild(storage: Any, offset: Any, shape, strides, *rest, dtype: np.dtype | None = None) -> StoredTensor:
    """torch._utils._rebuild_tensor_v2; rest: requires_grad, hooks, metadata (conjugate or negative views)."""
    if len(rest) > 2 and rest[2]:
        raise Refusal("a tensor has metadata (a conjugate or negative view)")
    checked(storage, Storage)
    dtype = dtype or storage.dtype
    shape, strides = tuple(shape), tuple(strides)
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("a tensor whose shape, strides or offset are no sizes")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 not in shape and last >= storage.items * storage.dtype.itemsize // dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} reaches beyond its storage of {storage.items}")
    if math.prod(shape) > max(_MAX_EXPANDED, storage.items * storage.dtype.itemsize):
        raise ValueError(f"a tensor of shape {shape} repeats a storage of {storage.items}")
    return StoredTensor(shape, dtype, storage, offset, strides)


def rebuild_v3(storage, offset, shape, strides, requires_grad, hooks, dtype, metadata=None) -> StoredTensor:
    """torch._utils._rebuild_tensor_v3: the dtype is its own and not that of the storage."""
    return rebuild(storage, offset, shape, strides, requires_grad, hooks, metadata, dtype=dtype)


def checked(value: Any, kind: type) -> Any:
    """The value. Raises TypeError unless it is of just this type."""
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value

"""Reads files of `torch.save` (.pt, .ckpt, .bin, also gzipped) without torch and without running what is in them.

A pickle is a program that may call anything. This one is run by a small machine of our own that knows tensors,
containers and plain values; every other class is refused by name before anything is called. Both layouts are read: the
zip of torch >= 1.6 and the older stream of pickles followed by raw storages.

    tensors = load_state_dict("pytorch_model.bin")      # {name: array}
    sample = load_torch("data_0.ckpt", lazy=True)       # nested containers; tensors are read when asked for
"""

import contextlib
import gzip
import io
import math
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle3_jax.errors import UserError

_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = {
    **{name: np.dtype(name) for name in ["float16", "float32", "float64", "complex64", "complex128", "bool"]},
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *_FP8)},
}
_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
# A file of a few kilobytes may ask for any amount of memory; honest ones stay far below these.
_MAX_PROGRAM = 1 << 24  # bytes of a pickle
_MAX_COPIED = 1 << 24  # elements that calls may copy
_MAX_EXPANDED = 1 << 20  # elements of a tensor that repeats its storage
_MAX_GZIP, _MAX_RATIO = 1 << 26, 32  # a gzipped file may unpack to this, or to so many times its own size
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


def load_torch(path: str | Path, lazy: bool = False) -> Any:
    """What `torch.save` wrote: dicts, lists, tuples, sets, plain values, and tensors as read-only numpy arrays.

    Tensors keep dtype, strides and shared storage (bfloat16 and float8 as `ml_dtypes`). lazy: tensors come as
    `StoredTensor`s, whose `read()` gives the array; their data stays on disk until then (a gzipped or old-layout file
    is read whole). Raises UserError for a torn file, another kind of file, and anything that is not a tensor, a
    container or a plain value, naming its class; nothing in the file is executed.
    """
    path = Path(path)
    with _told(path):
        content = _unpack(path)
    return content if lazy else _convert(content, lambda tensor: tensor.read())


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns whatever a refused or damaged file raises into a UserError that names it."""
    try:
        yield
    except _Refusal as error:
        raise UserError(f"{error} / {path} / only tensors, containers and plain values are read") from error
    except _TORN as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"cannot read the file / {path} / {error.strerror}") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        message = f"cannot read it as a file of torch.save / {path} / {reason}; is it torn? copy it again"
        raise UserError(message) from error


def load_state_dict(path: str | Path) -> dict[str, np.ndarray]:
    """The tensors of a weights file (`pytorch_model.bin`), {name: array}. UserError if it holds anything else."""
    content = load_torch(path)
    if not isinstance(content, dict) or not content:
        raise UserError(f"not a dict of tensors but a {type(content).__name__} / {path} / give a state dict")
    other = [name for name, value in content.items() if not isinstance(name, str) or not isinstance(value, np.ndarray)]
    if other:
        kind = type(content[other[0]]).__name__
        raise UserError(f"{other[0]!r} is no tensor but a {kind} / {path} / give a plain state dict")
    return content


class _Refusal(Exception):
    """The file holds something that is not read, on purpose."""


@dataclass
class _Storage:
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
    storage: _Storage
    offset: int
    strides: tuple[int, ...]
    path: Path = Path()

    def read(self) -> np.ndarray:
        """The array. UserError if its part of the file is damaged or gone."""
        with _told(self.path):
            return self._read()

    def _read(self) -> np.ndarray:
        flat = self.storage.array(self.dtype)
        strides = [step * self.dtype.itemsize for step in self.strides]
        # Torch writes anything for the strides of an empty tensor.
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides, writeable=False)


def _rebuild(storage: Any, offset: Any, shape, strides, *rest, dtype: np.dtype | None = None) -> StoredTensor:
    """torch._utils._rebuild_tensor_v2; rest: requires_grad, hooks, metadata (conjugate or negative views)."""
    if len(rest) > 2 and rest[2]:
        raise _Refusal("a tensor has metadata (a conjugate or negative view)")
    _checked(storage, _Storage)
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


def _rebuild_v3(storage, offset, shape, strides, requires_grad, hooks, dtype, metadata=None) -> StoredTensor:
    return _rebuild(storage, offset, shape, strides, requires_grad, hooks, metadata, dtype=dtype)


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":  # how protocol 2 writes bytes
        raise ValueError("bytes in another encoding than latin1")
    return _checked(text, str).encode(encoding)


def _device(*place: Any) -> str:
    if any(type(part) not in (str, int) for part in place):
        raise TypeError("a device that is no name and number")
    return ":".join(map(str, place))


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    items = list(pairs.items() if isinstance(pairs, dict) else pairs)
    return _pairs([part for item in items for part in _checked_pair(item)])


def _checked_pair(item: Any) -> Any:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError("a dict of what are no pairs")
    return item


# What a pickle may call, with what is called in its stead. Data (dtypes, storage classes) is not callable.
_CALLS: dict[str, Callable] = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": lambda data, requires_grad, hooks: data,
    "torch.Size": tuple,
    "torch.device": _device,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "builtins.set": lambda items=(): set(_keys(items)),
    "__builtin__.set": lambda items=(): set(_keys(items)),
    "_codecs.encode": _encode,
}


@dataclass(frozen=True)
class _Global:
    """A name the pickle mentions: a function it may call, a dtype or a storage class."""

    name: str
    value: Any


def _find(module: str, name: str) -> Any:
    full = f"{module}.{name}"
    if full in _CALLS:
        return _Global(full, _CALLS[full])
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return _Global(full, _DTYPES[_STORAGES[name]])
    if module == "torch" and (dtype := _DTYPES.get(name)) is not None:
        return dtype
    raise _Refusal(f"it holds a {full}")


_MARK = object()
_PUSH = frozenset(
    ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
    + ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
    + ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}


def _run(stream: io.BytesIO, persistent: Callable[[tuple], _Storage] | None) -> Any:
    """Runs one pickle and leaves the stream behind it. persistent: makes storages from their identifying tuples."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    copied = 0

    def pop_mark() -> list[Any]:
        place = len(stack) - 1
        while stack[place] is not _MARK:  # from the top, so that many marks take no longer than their items
            place -= 1
        items = stack[place + 1 :]
        del stack[place:]
        return items

    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                stack.append(_MARK)
            case "POP":
                stack.pop()
            case "POP_MARK":
                pop_mark()
            case "DUP":
                stack.append(stack[-1])
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _PUSH:
                stack.append(argument)
            case name if name in _EMPTY:
                stack.append(_EMPTY[name]())
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "TUPLE":
                stack.append(tuple(pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "LIST":
                stack.append(pop_mark())
            case "DICT":
                stack.append(_pairs(pop_mark()))
            case "FROZENSET":
                stack.append(frozenset(_keys(pop_mark())))
            case "APPEND":
                item = stack.pop()
                _checked(stack[-1], list).append(item)
            case "APPENDS":
                items = pop_mark()
                _checked(stack[-1], list).extend(items)
            case "ADDITEMS":
                items = pop_mark()
                _checked(stack[-1], set).update(_keys(items))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _checked(stack[-1], dict).update(_pairs([key, value]))
            case "SETITEMS":
                items = pop_mark()
                _checked(stack[-1], dict).update(_pairs(items))
            case "GLOBAL":
                stack.append(_find(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_find(module, name))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not isinstance(function, _Global) or function.name not in _CALLS:
                    raise _Refusal(f"it calls {getattr(function, 'name', type(function).__name__)!r}")
                copied += sum(len(part) for part in arguments if isinstance(part, _SIZED))
                if copied > _MAX_COPIED:
                    raise _Refusal("its calls copy the same data over and over")
                stack.append(function.value(*arguments))
            case "BUILD":
                stack.pop()  # attributes of an OrderedDict: torch keeps version numbers there
                _checked(stack[-1], dict)
            case "BINPERSID":
                if persistent is None:
                    raise ValueError("a storage where none can be")
                stack.append(persistent(_checked(stack.pop(), tuple)))
            case name:
                raise _Refusal(f"it uses the pickle operation {name}")
    raise EOFError("the pickle has no end")


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(_keys(items[::2]), items[1::2], strict=True))


_SIZED = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


def _keys(items: Any) -> Any:
    """Items that may be hashed: tuples of tuples take forever, and so do large integers chosen to collide."""
    for item in items:
        if item is not None and (type(item) not in (str, int, bool) or (type(item) is int and item.bit_length() > 60)):
            raise _Refusal("a dict or set has other keys than strings, integers and None")
    return items


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _unpack(path: Path) -> Any:
    """The content of a file, with tensors as StoredTensors; checks that nothing else than data is in it."""
    with open(path, "rb") as file:
        head = file.read(4)
    source: Path | bytes = path
    if head[:2] == b"\x1f\x8b":
        source = _gunzip(path)
        head = source[:4]
    if head == b"PK\x03\x04":
        content = _read_zip(source)
    else:
        content = _read_legacy(path.read_bytes() if isinstance(source, Path) else source)
    return _convert(content, lambda tensor: replace(tensor, path=path))


def _gunzip(path: Path) -> bytes:
    limit = max(_MAX_GZIP, _MAX_RATIO * path.stat().st_size)
    with gzip.open(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _Refusal(f"it unpacks to more than {limit} bytes, {_MAX_RATIO} times its size")
    return data


def _open_zip(source: Path | bytes) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source)


def _read_zip(source: Path | bytes) -> Any:
    with _open_zip(source) as archive:
        names = archive.namelist()
        roots = [name.removesuffix("data.pkl") for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise _Refusal("it is a zip archive that torch.save did not write (no data.pkl)")
        root = roots[0]
        if any(name.startswith(f"{root}code/") for name in names):
            raise _Refusal("it is a TorchScript archive, a program")
        sizes = _stored_sizes(archive, source)
        if sizes[f"{root}data.pkl"] > _MAX_PROGRAM or sizes.get(f"{root}byteorder", 0) > _MAX_PROGRAM:
            raise _Refusal(f"its data.pkl has more than {_MAX_PROGRAM} bytes")
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise _Refusal("its tensors are big-endian")
        program = archive.read(f"{root}data.pkl")

    def member(key: str) -> bytes:
        with _open_zip(source) as archive:
            _stored_sizes(archive, source)
            return archive.read(f"{root}data/{key}")

    storages: dict[str, _Storage] = {}

    def persistent(identity: tuple) -> _Storage:
        kind, storage_class, key, _location, items = identity
        place = f"{root}data/{_checked(key, str)}"
        if kind != "storage" or place not in sizes:
            raise ValueError(f"storage {key[:40]!r} is missing")
        storage = storages.setdefault(key, _storage(storage_class, items, lambda: member(key)))
        if sizes[place] != storage.items * storage.dtype.itemsize:  # padding lies between members, never in them
            raise ValueError(f"a storage of {storage.items} {storage.dtype} has {sizes[place]} bytes")
        return storage

    return _run(io.BytesIO(program), persistent)


def _stored_sizes(archive: zipfile.ZipFile, source: Path | bytes) -> dict[str, int]:
    """{member: bytes}. torch.save never compresses; a member that is compressed or overlaps another is a trap."""
    members = archive.infolist()
    if any(m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size for m in members):
        raise _Refusal("it has compressed members, as torch.save never writes")
    total = len(source) if isinstance(source, bytes) else source.stat().st_size
    if sum(m.file_size for m in members) > total:
        raise ValueError("its members are longer than the file")
    return {m.filename: m.file_size for m in members}


def _storage(storage_class: Any, items: Any, read: Callable[[], bytes]) -> _Storage:
    dtype = _checked(storage_class, _Global).value
    if not isinstance(dtype, np.dtype) or type(items) is not int or items < 0:
        raise ValueError("a storage of no length")
    return _Storage(dtype, items, read)


def _is_text(data: bytes) -> bool:
    """JSON and the like: no control characters but blanks in the first kilobyte."""
    return all(byte >= 32 or byte in b"\t\n\r" for byte in data[:1024])


def _read_legacy(data: bytes) -> Any:
    """The layout before torch 1.6: magic, protocol, machine facts, content, storage keys, then the storages."""
    stream = io.BytesIO(data)
    if b"ustar" in data[:512]:
        raise _Refusal("it is a tar of torch 0.1")
    if not data.startswith(b"\x80") or _run(stream, None) != _LEGACY_MAGIC:
        kind = "is empty" if not data else "is text" if _is_text(data) else "is no zip and no old file of torch.save"
        raise _Refusal(f"it {kind}, not something torch.save wrote")
    if _run(stream, None) != _LEGACY_PROTOCOL or not _checked(_run(stream, None), dict)["little_endian"]:
        raise _Refusal("it was written by an unknown version or a big-endian machine")
    storages: dict[str, _Storage] = {}

    def persistent(identity: tuple) -> _Storage:
        kind, storage_class, key, _location, items, view = identity
        if kind != "storage" or view is not None:
            raise _Refusal("it has views of storages, as only torch 0.x wrote them")
        _checked(key, str)
        return storages.setdefault(key, _storage(storage_class, items, lambda: places[key]))

    content = _run(stream, persistent)
    places: dict[str, bytes] = {}
    for key in _checked(_run(stream, None), list):
        storage = storages[_checked(key, str)]
        if int.from_bytes(stream.read(8), "little") != storage.items:
            raise ValueError(f"storage {key} has another length than its tensors say")
        places[key] = stream.read(storage.items * storage.dtype.itemsize)
        if len(places[key]) < storage.items * storage.dtype.itemsize:
            raise EOFError("the file ends inside a tensor")
    return content


def _convert(content: Any, tensor: Callable[[StoredTensor], Any]) -> Any:
    """The same containers with `tensor` applied to each tensor; anything that is not data is refused."""
    done: dict[int, Any] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, StoredTensor):
            return tensor(value)
        if value is None or isinstance(value, bool | int | float | str | bytes | bytearray | np.dtype):
            return value
        if not isinstance(value, dict | list | tuple | set | frozenset):
            raise _Refusal(f"it holds a {getattr(value, 'name', type(value).__name__)}")
        if id(value) not in done:
            done[id(value)] = None  # a container inside itself meets this
            if isinstance(value, dict):
                done[id(value)] = {walk(key): walk(item) for key, item in value.items()}
            else:
                done[id(value)] = type(value)(walk(item) for item in value)
        if done[id(value)] is None:
            raise _Refusal("a container holds itself")
        return done[id(value)]

    return walk(content)

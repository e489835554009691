"""Reads files of `torch.save` (.pt, .ckpt, .bin, also gzipped) without torch and without running what is in them.

A pickle is a program that may call anything: `pickle_machine` runs it, and knows data only. Both layouts are read: the
zip of torch >= 1.6 and the older stream of pickles followed by raw storages.

    tensors = load_state_dict("pytorch_model.bin")      # {name: array}
    sample = load_torch("data_0.ckpt", lazy=True)       # nested containers; tensors are read when asked for
"""

import gzip
import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.data.pickle_machine import new_storage, run_pickle
from eagle3_jax.data.torch_tensors import Refusal, Storage, StoredTensor, checked, told
from eagle3_jax.errors import UserError

_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
# A file of a few kilobytes may ask for any amount of memory; honest ones stay far below these.
_MAX_PROGRAM = 1 << 24  # bytes of a pickle
_MAX_GZIP, _MAX_RATIO = 1 << 26, 32  # a gzipped file may unpack to this, or to so many times its own size


def load_torch(path: str | Path, lazy: bool = False) -> Any:
    """What `torch.save` wrote: dicts, lists, tuples, sets, plain values, and tensors as read-only numpy arrays.

    Tensors keep dtype, strides and shared storage (bfloat16 and float8 as `ml_dtypes`). lazy: tensors come as
    `StoredTensor`s, whose `read()` gives the array; their data stays on disk until then (a gzipped or old-layout file
    is read whole). Raises UserError for a torn file, another kind of file, and anything that is not a tensor, a
    container or a plain value, naming its class; nothing in the file is executed.
    """
    path = Path(path)
    with told(path):
        content = _unpack(path)
    return content if lazy else _convert(content, lambda tensor: tensor.read())


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
        raise Refusal(f"it unpacks to more than {limit} bytes, {_MAX_RATIO} times its size")
    return data


def _open_zip(source: Path | bytes) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source)


def _read_zip(source: Path | bytes) -> Any:
    with _open_zip(source) as archive:
        names = archive.namelist()
        roots = [name.removesuffix("data.pkl") for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise Refusal("it is a zip archive that torch.save did not write (no data.pkl)")
        root = roots[0]
        if any(name.startswith(f"{root}code/") for name in names):
            raise Refusal("it is a TorchScript archive, a program")
        sizes = _stored_sizes(archive, source)
        if sizes[f"{root}data.pkl"] > _MAX_PROGRAM or sizes.get(f"{root}byteorder", 0) > _MAX_PROGRAM:
            raise Refusal(f"its data.pkl has more than {_MAX_PROGRAM} bytes")
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise Refusal("its tensors are big-endian")
        program = archive.read(f"{root}data.pkl")

    def member(key: str) -> bytes:
        with _open_zip(source) as archive:
            _stored_sizes(archive, source)
            return archive.read(f"{root}data/{key}")

    storages: dict[str, Storage] = {}

    def persistent(identity: tuple) -> Storage:
        kind, storage_class, key, _location, items = identity
        place = f"{root}data/{checked(key, str)}"
        if kind != "storage" or place not in sizes:
            raise ValueError(f"storage {key[:40]!r} is missing")
        storage = storages.setdefault(key, new_storage(storage_class, items, lambda: member(key)))
        if sizes[place] != storage.items * storage.dtype.itemsize:  # padding lies between members, never in them
            raise ValueError(f"a storage of {storage.items} {storage.dtype} has {sizes[place]} bytes")
        return storage

    return run_pickle(io.BytesIO(program), persistent)


def _stored_sizes(archive: zipfile.ZipFile, source: Path | bytes) -> dict[str, int]:
    """{member: bytes}. torch.save never compresses; a member that is compressed or overlaps another is a trap."""
    members = archive.infolist()
    if any(m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size for m in members):
        raise Refusal("it has compressed members, as torch.save never writes")
    total = len(source) if isinstance(source, bytes) else source.stat().st_size
    if sum(m.file_size for m in members) > total:
        raise ValueError("its members are longer than the file")
    return {m.filename: m.file_size for m in members}


def _is_text(data: bytes) -> bool:
    """JSON and the like: no control characters but blanks in the first kilobyte."""
    return all(byte >= 32 or byte in b"\t\n\r" for byte in data[:1024])


def _read_legacy(data: bytes) -> Any:
    """The layout before torch 1.6: magic, protocol, machine facts, content, storage keys, then the storages."""
    stream = io.BytesIO(data)
    if b"ustar" in data[:512]:
        raise Refusal("it is a tar of torch 0.1")
    if not data.startswith(b"\x80") or run_pickle(stream, None) != _LEGACY_MAGIC:
        kind = "is empty" if not data else "is text" if _is_text(data) else "is no zip and no old file of torch.save"
        raise Refusal(f"it {kind}, not something torch.save wrote")
    if run_pickle(stream, None) != _LEGACY_PROTOCOL or not checked(run_pickle(stream, None), dict)["little_endian"]:
        raise Refusal("it was written by an unknown version or a big-endian machine")
    storages: dict[str, Storage] = {}

    def persistent(identity: tuple) -> Storage:
        kind, storage_class, key, _location, items, view = identity
        if kind != "storage" or view is not None:
            raise Refusal("it has views of storages, as only torch 0.x wrote them")
        checked(key, str)
        return storages.setdefault(key, new_storage(storage_class, items, lambda: places[key]))

    content = run_pickle(stream, persistent)
    places: dict[str, bytes] = {}
    for key in checked(run_pickle(stream, None), list):
        storage = storages[checked(key, str)]
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
            raise Refusal(f"it holds a {getattr(value, 'name', type(value).__name__)}")
        if id(value) not in done:
            done[id(value)] = None  # a container inside itself meets this
            if isinstance(value, dict):
                done[id(value)] = {walk(key): walk(item) for key, item in value.items()}
            else:
                done[id(value)] = type(value)(walk(item) for item in value)
        if done[id(value)] is None:
            raise Refusal("a container holds itself")
        return done[id(value)]

    return walk(content)

"""Checkpoint tensors in, parameter tree out: strict keys, strict shapes, no copies kept."""

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int
from safetensors import SafetensorError, safe_open

from eagle3_jax.errors import UserError
from eagle3_jax.files import parse_json
from eagle3_jax.sharding import ONE_DEVICE, Placement

Params = dict[str | int, Any]  # nested; entries of a layer list have integer keys
FLOATS = ("float32", "float16", "bfloat16")  # that weights may have


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder: those of the index if there is one, else model.safetensors."""
    names = _weight_files(folder, "model.safetensors", "*.safetensors")
    if not names:
        raise UserError(f"no *.safetensors file in {folder} / point to a model folder with safetensors weights")
    return names


def pickle_files(folder: Path) -> list[Path]:
    """The same of torch's pytorch_model.bin, and there may be none."""
    return _weight_files(folder, "pytorch_model.bin", "pytorch_model*.bin")


def _weight_files(folder: Path, single: str, pattern: str) -> list[Path]:
    index = folder / f"{single}.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"no weight_map of tensors to files / {index} / remove the index or copy it again")
        names = sorted(set(weight_map.values()))
    elif (folder / single).exists():
        names = [single]
    else:
        names = sorted({name for p in folder.glob(pattern) for name in _shards(p.name)})
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UserError(f"{folder} lacks the weight file(s) {shorten(missing)} / complete the download")
    return [folder / name for name in names]


def _shards(name: str) -> list[str]:
    """All names of a set of shards that a name like model-00001-of-00003.safetensors says it belongs to."""
    shard = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.(?:safetensors|bin))", name)
    return [f"{shard[1]}{i + 1:05d}{shard[2]}" for i in range(int(shard[3]))] if shard else [name]


class TensorFiles:
    """All tensors of some safetensors files, by name, each read when it is asked for and not before.

    The files are read, not mapped: of a mapped file, every page that was touched counts as the process's memory, so
    that loading would need a whole shard beside the tensor at hand.
    """

    def __init__(self, files: Iterable[Path]):
        """Reads the headers. UserError for a torn file or a name that lies in two files."""
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in files:
            try:
                with safe_open(file, framework="np"):  # checks header and length
                    pass
                with open(file, "rb") as opened:
                    size = int.from_bytes(opened.read(8), "little")
                    header = parse_json(opened.read(size))
            except (SafetensorError, OSError, ValueError) as error:
                raise _torn(file, error) from error
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if name in self._places:
                    raise UserError(f"{name} lies in two files / {self._places[name][0]}, {file} / remove one of them")
                self._places[name] = (file, 8 + size, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, name: str) -> np.ndarray:
        """The tensor, in the dtype it is stored in."""
        file, start, entry = self._places[name]
        begin, end = entry["data_offsets"]
        try:
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            data = np.fromfile(file, dtype, (end - begin) // dtype.itemsize, offset=start + begin)
            return data.reshape(entry["shape"])
        except KeyError as error:
            raise UserError(f"{name} has the dtype {entry['dtype']}, which is not supported / {file}") from error
        except (OSError, ValueError) as error:
            raise _torn(file, error) from error

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, self.read(name)) for name in self)


def _torn(file: Path, error: Exception) -> UserError:
    return UserError(f"cannot read weights / {file} / {error}; the file may be torn: copy it again")


_DTYPES = {
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4"},
    **{"U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": jnp.bfloat16},
    **{"F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2, "F8_E8M0": jnp.float8_e8m0fnu},
}


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor, one at a time. A torn file or a name in two files is a UserError."""
    yield from TensorFiles(files).items()


def with_progress(tensors: Iterable[tuple], total: int | None, title: str) -> Iterable[tuple]:
    """The same tensors; on a terminal, with a bar on stderr: how many of `total` (None: unknown) have been read."""
    if not sys.stderr.isatty():
        return tensors
    from rich.console import Console
    from rich.progress import track

    return track(tensors, f"loading {title}", total, console=Console(stderr=True), transient=True)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except OSError as error:
        raise UserError(
            f"cannot read {path.name} / {path} / {error.strerror}: point to a folder that has it"
        ) from error
    except ValueError as error:
        raise UserError(f"not valid JSON / {path} / {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"expected a JSON object / {path} / it holds a {type(content).__name__}")
    return content


def checked_dtype(dtype: Any) -> jnp.dtype:
    """One of FLOATS, by name or as a type of numpy or jax; UserError for anything else."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # numpy takes None for float64
    except TypeError:
        found = None
    if found is None or found.name not in FLOATS:
        raise UserError(f"dtype {dtype!r} / give one of {', '.join(FLOATS)}")
    return found


class Graph:
    """The static half of an nnx module, split once. Hashed once: hashing a GraphDef of 300 arrays takes 2.6 ms, and
    jit hashes its static arguments at every call."""

    __slots__ = ("_definition", "_hash")

    def __init__(self, definition: nnx.GraphDef):
        self._definition, self._hash = definition, hash(definition)

    def merge(self, params: Params) -> Any:
        """The module with these parameters, for use inside jit."""
        return nnx.merge(self._definition, params)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Graph) and self._definition == other._definition)


def abstract_params(module: nnx.Module) -> tuple[Graph, dict[str, tuple[int, ...]]]:
    """Splits a module made under `nnx.eval_shape`: its graph and {checkpoint name: shape}."""
    graph, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    return Graph(graph), {".".join(map(str, path)): tuple(variable.shape) for path, variable in flat}


def fill(
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterable[tuple],
    dtype,
    where: str,
    ignore=(),
    float32=(),
    placement: Placement = ONE_DEVICE,
) -> Params:
    """Builds the nested parameter tree; every expected name must come exactly once, in its shape, and nothing else.

    tensors: (name, array), or (name, array, i) for entry i of a stacked parameter. One at a time is in host memory.
    ignore: names whose presence is fine and whose content is not needed.
    dtype: target dtype, or None to keep each tensor's own; float32: endings of names that have that one instead. int8
    codes (`models.int8`) stay what they are.
    placement: where each goes at once. Raises UserError listing what is wrong.
    """
    arrays: dict[str, jax.Array] = {}
    entries: dict[str, set[int]] = {}
    unknown = []
    for name, array, *entry in tensors:
        if name in ignore or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in shapes:
            unknown.append(name)
            continue
        shape = shapes[name][1:] if entry else shapes[name]
        if tuple(array.shape) != shape:
            raise UserError(f"{name} has shape {list(array.shape)}, the config says {list(shape)} / {where}")
        own = jnp.float32 if name.endswith(tuple(float32)) else jnp.int8 if array.dtype == jnp.int8 else dtype
        if name in arrays and (not entry or entry[0] in entries.get(name, entry)):
            part = f"{name}{entry}" if entry else name
            raise UserError(f"{part} comes twice, under two names / {where} / remove one of them")
        if not entry:
            arrays[name] = placement.parameter(name, array, own)
            continue
        if name not in arrays:
            arrays[name] = placement.zeros(name, shapes[name], array.dtype if own is None else own)
        arrays[name] = _put(arrays[name], placement.entry(name, array, arrays[name].dtype), entry[0])
        entries.setdefault(name, set()).add(entry[0])
    missing = [name for name in shapes if name not in arrays]
    missing += [f"{name}[{i}]" for name, come in entries.items() for i in range(shapes[name][0]) if i not in come]
    if missing or unknown:
        parts = [f"missing: {shorten(missing)}"] * bool(missing) + [f"not used: {shorten(unknown)}"] * bool(unknown)
        raise UserError(f"weights do not fit the config / {where} / {'; '.join(parts)}")
    params: Params = {}
    for name, array in arrays.items():
        insert(params, name, array)
    return params


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, entry: jax.Array, index: Int[Array, ""]) -> jax.Array:
    """The stack with one entry replaced, in place."""
    return jax.lax.dynamic_update_index_in_dim(stack, entry, index, 0)


def with_one_head(tensors: Iterable[tuple], where: str) -> Iterator[tuple]:
    """The tensors of a model whose head is said to be its embedding; UserError if a head is stored that is another
    (by a sample of rows): transformers 5 takes it then, other systems leave it."""
    seen = {}
    for name, array, *entry in tensors:
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            seen[name] = np.asarray(array[:: max(len(array) // 64, 1)], np.float32)
            if len({rows.tobytes() for rows in seen.values()}) > 1:
                raise UserError(
                    f"tie_word_embeddings is on, given or by default, but lm_head.weight is another matrix / {where} / "
                    "set it to false, or remove lm_head.weight"
                )
        yield name, array, *entry


def insert(tree: Params, name: str, value: Any) -> None:
    """Puts value at a dotted path, numbers as integer keys (the form of `nnx.to_pure_dict`)."""
    *path, last = [int(part) if part.isdigit() else part for part in name.split(".")]
    for part in path:
        tree = tree.setdefault(part, {})
    tree[last] = value


def flatten(tree: Params, prefix: str = "") -> dict[str, Any]:
    """{dotted name: array}, the inverse of `insert`."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def shorten(names: list[str], limit: int = 8) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest

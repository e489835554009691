"""Checkpoint tensors in, parameter tree out: strict keys, strict shapes, no copies kept."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from eagle3_jax.errors import UserError

Params = dict[str | int, Any]  # nested; entries of a layer list have integer keys


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder: those of the index if there is one, else model.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"no weight_map of tensors to files / {index} / remove the index or copy it again")
        names = sorted(set(weight_map.values()))
    elif (folder / "model.safetensors").exists():
        names = ["model.safetensors"]
    else:
        names = sorted({name for p in folder.glob("*.safetensors") for name in _shards(p.name)})
    if not names:
        raise UserError(f"no *.safetensors file in {folder} / point to a model folder with safetensors weights")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UserError(f"{folder} lacks the weight file(s) {', '.join(missing)} / complete the download")
    return [folder / name for name in names]


def _shards(name: str) -> list[str]:
    """All names of a set of shards that a name like model-00001-of-00003.safetensors says it belongs to."""
    shard = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.safetensors)", name)
    return [f"{shard[1]}{i + 1:05d}{shard[2]}" for i in range(int(shard[3]))] if shard else [name]


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor, one at a time. A torn file or a name in two files is a UserError."""
    places: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                    if name in places:
                        raise UserError(f"{name} lies in two files / {places[name]}, {file} / remove one of them")
                    places[name] = file
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read weights / {file} / {error}; the file may be torn: copy it again") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read {path.name} / {path} / {error.strerror}: point to a folder that has it"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not valid JSON / {path} / {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"expected a JSON object / {path} / it holds a {type(content).__name__}")
    return content


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
    shapes: dict[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]], dtype, where: str, ignore=()
) -> Params:
    """Builds the nested parameter tree; every expected name must come exactly once, in its shape, and nothing else.

    ignore: names whose presence is fine and whose content is not needed.
    dtype: target dtype, or None to keep each tensor's own. Raises UserError listing what is wrong.
    """
    params, seen, unknown = {}, set(), []
    for name, array in tensors:
        if name in ignore or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in shapes:
            unknown.append(name)
            continue
        if tuple(array.shape) != shapes[name]:
            raise UserError(f"{name} has shape {list(array.shape)}, the config says {list(shapes[name])} / {where}")
        insert(params, name, jnp.asarray(array, dtype))
        seen.add(name)
    missing = [name for name in shapes if name not in seen]
    if missing or unknown:
        parts = [f"missing: {shorten(missing)}"] * bool(missing) + [f"not used: {shorten(unknown)}"] * bool(unknown)
        raise UserError(f"weights do not fit the config / {where} / {'; '.join(parts)}")
    return params


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

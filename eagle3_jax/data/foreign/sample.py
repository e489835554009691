"""One document of stored features, whatever program wrote it: token ids, loss mask, and states of the target.

A sample says what its file says and no more. Which points of the residual stream its states are, and whether the last
one is before or after the final norm, is settled in `wiring.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.data.torch_tensors import StoredTensor
from eagle3_jax.data.unpickle import load_torch
from eagle3_jax.errors import UserError


@dataclass(frozen=True)
class Says:
    """What a file, or one written beside it, states about its states. None: it does not say.

    ids: one number a state, in the words of `convention` (`block-input` or `block-output`); last_hidden: `pre-norm` or
    `post-norm`; where: what said so.
    """

    ids: tuple[int, ...] | None = None
    convention: str | None = None
    last_hidden: str | None = None
    where: str = ""


@dataclass(frozen=True)
class Sample:
    """A stored document.

    input_ids: int32 [T]; loss_mask: bool [T], None where the format keeps it elsewhere; state_names: each state in the
    file's own words, in its order; hidden_size: width of a state; last_is_named: the last state is the target's last
    hidden state by its name in the file (in formats that keep a bare list nothing is); read: the states, [T, H] each.
    """

    path: Path
    format: str
    input_ids: np.ndarray
    loss_mask: np.ndarray | None
    state_names: tuple[str, ...]
    hidden_size: int
    last_is_named: bool
    says: Says
    read: Callable[[], list[np.ndarray]]

    def states(self) -> list[np.ndarray]:
        """The states [T, H], read from the file. UserError for numbers that are not finite or another length."""
        arrays = self.read()
        for name, array in zip(self.state_names, arrays, strict=True):
            if array.shape != (len(self.input_ids), self.hidden_size):
                raise UserError(f"{name} has shape {list(array.shape)} / {self.path} / the file changed meanwhile")
            if not np.isfinite(array.astype(np.float32)).all():
                raise UserError(f"{name} holds NaN or infinity / {self.path} / remove the file or make it again")
        return arrays


def without_batch(array: np.ndarray, rank: int) -> np.ndarray:
    """Drops leading axes of length one down to `rank`: SpecForge stores [1, T, H], others [T, H]."""
    while array.ndim > rank and array.shape[0] == 1:
        array = array[0]
    return array


def read_ids(value: Any, path: Path, name: str = "input_ids") -> np.ndarray:
    """Token ids int32 [T] of a tensor or a list."""
    array = without_batch(_array(value), 1)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{name} is {array.dtype}{list(array.shape)} / {path} / expected token ids [T]")
    ids = array.astype(np.int32)
    if (ids != array).any():
        raise UserError(f"{name} holds {array[ids != array][0]} / {path} / that is no token id")
    return ids


def read_mask(value: Any, length: int, path: Path) -> np.ndarray:
    """Loss mask bool [T] of a tensor or a list of 0 and 1."""
    array = without_batch(_array(value), 1)
    if array.shape != (length,):
        raise UserError(f"loss_mask has shape {list(array.shape)} for {length} tokens / {path} / make the file again")
    if not np.isin(array, (0, 1)).all():
        raise UserError(f"loss_mask holds other values than 0 and 1 / {path} / make the file again")
    return array.astype(bool)


def optional_mask(content: Mapping[str, Any], length: int, path: Path) -> np.ndarray | None:
    value = content.get("loss_mask")
    return None if value is None else read_mask(value, length, path)


def check_length(shape: tuple[int, ...], name: str, length: int, path: Path) -> None:
    """States and tokens must be equally many: vLLM with prefix caching, for one, stores too few states."""
    if not shape or shape[0] != length:
        raise UserError(f"{name} has shape {list(shape)} for {length} tokens / {path} / make the file again")


def _array(value: Any) -> np.ndarray:
    return value.read() if isinstance(value, StoredTensor) else np.asarray(value)


def is_tensor(value: Any, *ranks: int) -> bool:
    """Whether a value of a file is a tensor, of one of these ranks if any are given."""
    return isinstance(value, StoredTensor) and (not ranks or len(value.shape) in ranks)


def fused_states(
    path: Path, content: Mapping[str, Any], aux_key: str, last_key: str, format_name: str, says: Says
) -> Sample:
    """A sample of the formats that store [T, A*H] fused states under one key and the last hidden state under another.

    The number of states follows from the two widths.
    """
    ids = read_ids(content["input_ids"], path)
    aux_shape, last_shape = (_shape(content[key], 2) for key in (aux_key, last_key))
    check_length(last_shape, last_key, len(ids), path)
    empty = 0 in aux_shape  # ModelOpt stores an empty tensor where no layer was asked for
    if not empty:
        check_length(aux_shape, aux_key, len(ids), path)
    width = last_shape[-1]
    count, rest = (0, 0) if empty else divmod(aux_shape[-1], width)
    if rest:
        raise UserError(
            f"{aux_key} is {aux_shape[-1]} wide and {last_key} {width} / {path} / {aux_key} must be whole states"
        )

    def read(source: Mapping[str, Any]) -> list[np.ndarray]:
        aux = [] if empty else np.split(without_batch(_array(source[aux_key]), 2), count, axis=-1)
        return [*aux, without_batch(_array(source[last_key]), 2)]

    names = tuple(f"{aux_key}[:, {i * width}:{(i + 1) * width}]" for i in range(count)) + (last_key,)
    mask = optional_mask(content, len(ids), path)
    return Sample(path, format_name, ids, mask, names, width, True, says, lambda: read(_reload(path)))


def _reload(path: Path) -> Any:
    return load_torch(path, lazy=True)


def _shape(value: StoredTensor, rank: int) -> tuple[int, ...]:
    shape = value.shape
    while len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return shape

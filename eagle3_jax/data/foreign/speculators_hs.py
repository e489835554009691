"""Hidden states of speculators 0.5 and later, as vLLM's extractor writes them: `hidden_states/hs_{i}.safetensors`.

    token_ids [T], hidden_states [T, A+1, H]

The loss mask lies apart, in the Hugging Face dataset (arrow) of which `hidden_states/` is a subfolder. The numbers of
the states are in nobody's file: they were `--target-layer-ids` (vLLM's numbering, block inputs) and the last layer.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from eagle3_jax.data.foreign.sample import Sample, Says, check_length, read_ids, read_mask
from eagle3_jax.errors import UserError

NAME = "speculators hs (token_ids, hidden_states)"


def read(path: Path) -> Sample:
    """Raises UserError for a torn file and for other tensors than these."""
    with _opened(path) as file:
        names = set(file.keys())
        if not {"token_ids", "hidden_states"} <= names:
            raise UserError(
                f"no stored features but tensors {', '.join(sorted(names)[:6])} / {path} / expected token_ids and "
                "hidden_states"
            )
        ids = read_ids(file.get_tensor("token_ids"), path, "token_ids")
        shape = tuple(file.get_slice("hidden_states").get_shape())
        mask = read_mask(file.get_tensor("loss_mask"), len(ids), path) if "loss_mask" in names else None
    if len(shape) != 3:
        raise UserError(f"hidden_states has shape {list(shape)} / {path} / expected [T, states, H]")
    check_length(shape, "hidden_states", len(ids), path)

    def load() -> list[np.ndarray]:
        with _opened(path) as file:
            return list(file.get_tensor("hidden_states").swapaxes(0, 1))

    state_names = tuple(f"hidden_states[:, {i}]" for i in range(shape[1]))
    return Sample(path, NAME, ids, mask, state_names, shape[2], False, Says(), load)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, open; a torn or vanished one is a UserError, whenever it is read."""
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read the file / {path} / {error}; it may be torn: copy it again") from error

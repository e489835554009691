"""Samples of speculators 0.3 to 0.6, one `data_{i}.pt` a document: a bare list of states.

    {"input_ids": [T], "loss_mask": [T], "hidden_states": [[T, H], [T, H], ...]}

Its trainer took all but the last of the list as the draft's input and the last as the teacher's, whatever they were.
The generator of 0.3 and 0.4 wrote `data_config.json` beside the files with the layer ids; there an id means the output
of that block before any norm, and the states come in ascending order whatever order was asked for.
"""

import json
from pathlib import Path
from typing import Any

from eagle3_jax.data.foreign.sample import Sample, Says, check_length, is_tensor, optional_mask, read_ids
from eagle3_jax.data.unpickle import load_torch
from eagle3_jax.errors import UserError

NAME = "speculators v1 (list of states)"


def matches(content: dict[str, Any]) -> bool:
    states = content.get("hidden_states")
    return "input_ids" in content and isinstance(states, list | tuple) and bool(states) and all(map(is_tensor, states))


def read(path: Path, content: dict[str, Any]) -> Sample:
    states, ids = content["hidden_states"], read_ids(content["input_ids"], path)
    names = tuple(f"hidden_states[{i}]" for i in range(len(states)))
    for name, state in zip(names, states, strict=True):
        if len(state.shape) != 2:
            raise UserError(f"{name} has shape {list(state.shape)} / {path} / expected [T, H]")
        check_length(state.shape, name, len(ids), path)
    widths = {state.shape[1] for state in states}
    if len(widths) > 1:
        raise UserError(f"hidden_states have different widths {sorted(widths)} / {path} / make the file again")

    def load() -> list:
        return [state.read() for state in load_torch(path, lazy=True)["hidden_states"]]

    mask = optional_mask(content, len(ids), path)
    return Sample(path, NAME, ids, mask, names, widths.pop(), False, _says(path), load)


def _says(path: Path) -> Says:
    beside = path.parent / "data_config.json"
    if not beside.exists():
        return Says()
    try:
        config = json.loads(beside.read_text(encoding="utf-8"))
        ids = sorted(int(i) for i in config["hidden_states"]["layer_ids"])
        version = str(config["speculators_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the layer ids / {beside} / repair or remove the file ({error!r})") from error
    where = f"{beside.name} of speculators {version}"
    known = version.split(".")[:2] in (["0", "3"], ["0", "4"])
    return Says(tuple(ids), "block-output", "pre-norm", where) if known else Says(tuple(ids), where=where)

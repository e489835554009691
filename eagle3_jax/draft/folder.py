"""A draft folder on disk: config.json and tensors under whatever names, read whole and written whole or not at all."""

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from eagle3_jax.data.unpickle import load_state_dict
from eagle3_jax.errors import UserError
from eagle3_jax.models.weights import read_json, read_tensors, safetensors_files

Tensors = dict[str, np.ndarray]

# Other systems' names for what speculators (and we) call otherwise; prefixes first.
_RENAMES = (
    (re.compile(r"^(draft_model\.|model\.)+"), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)


def read_folder(place: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and all tensors by their stored names: safetensors, else pytorch_model*.bin, read without torch."""
    if not place.is_dir():
        raise UserError(f"not a draft folder / {place} / name a folder with config.json and weights")
    raw = read_json(place / "config.json")
    files = sorted(place.glob("pytorch_model*.bin"))
    if files and not any(place.glob("*.safetensors")):
        tensors: Tensors = {}
        for file in files:
            shard = load_state_dict(file)
            twice = sorted(tensors.keys() & shard.keys())
            if twice:
                raise UserError(f"{twice[0]} lies in two files / {place} / remove one of them")
            tensors |= shard
        return raw, tensors
    return raw, dict(read_tensors(safetensors_files(place)))


def canonical_names(tensors: Mapping[str, np.ndarray], where: str) -> Tensors:
    """The tensors by our (speculators') names. In SGLang's layers after the first, the norm before attention is called
    hidden_norm; in everyone else's, input_layernorm. UserError if two stored names mean the same tensor."""
    renamed: Tensors = {}
    came_from: dict[str, str] = {}
    for name, array in tensors.items():
        new = name
        for pattern, replacement in _RENAMES:
            new = pattern.sub(replacement, new)
        later = re.fullmatch(r"layers\.([1-9]\d*)\.hidden_norm\.weight", new)
        if later and f"{name.removesuffix('hidden_norm.weight')}input_layernorm.weight" not in tensors:
            new = f"layers.{later[1]}.input_layernorm.weight"
        if new in renamed:
            raise UserError(f"{came_from[new]} and {name} are the same tensor ({new}) / {where} / remove one of them")
        renamed[new], came_from[new] = array, name
    return renamed


def write_folder(place: Path, config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors; the folder appears complete or not at all.

    An older draft at `place` is replaced; anything else there is a UserError.
    """
    temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(contiguous, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _replace_folder(temporary, place)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write the draft / {place} / {reason} / free space and run again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(new: Path, place: Path) -> None:
    """Puts `new` at `place`; an older draft there is moved aside first, so that no mixture is ever visible."""
    if not place.exists():
        os.replace(new, place)
        return
    if not _is_draft(place) and any(place.iterdir()):
        raise UserError(f"{place} exists and is no draft folder / choose another path or remove it")
    old = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.old")
    os.replace(place, old)
    os.replace(new, place)
    shutil.rmtree(old, ignore_errors=True)


def _is_draft(place: Path) -> bool:
    """Whether config.json is that of a draft: every format names the draft vocabulary or the draft's own layout."""
    if not (place / "config.json").exists():
        return False
    raw = read_json(place / "config.json")
    return "speculators_model_type" in raw or "draft_vocab_size" in raw

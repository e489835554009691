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
from eagle3_jax.files import to_disk
from eagle3_jax.models.weights import pickle_files, read_json, read_tensors, safetensors_files

Tensors = dict[str, np.ndarray]

# Other systems' names for what speculators (and we) call otherwise; prefixes first, those of torch's wrappers too.
_RENAMES = (
    (re.compile(r"^((draft_model|model|module|_orig_mod|_fsdp_wrapped_module)\.)+"), ""),
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
    _check_types(raw, f"{place}/config.json")
    files = pickle_files(place) if any(place.glob("pytorch_model*.bin")) else []  # not for an index left behind
    pickled: Tensors = {}
    for file in files:
        shard = load_state_dict(file)
        twice = sorted(pickled.keys() & shard.keys())
        if twice:
            raise UserError(f"{twice[0]} lies in two files / {place} / remove one of them")
        pickled |= shard
    if files and not any(place.glob("*.safetensors")):
        return raw, pickled
    tensors = dict(read_tensors(safetensors_files(place)))
    if files:
        _refuse_two_drafts(tensors, pickled, place)
    return raw, tensors


def _refuse_two_drafts(tensors: Tensors, pickled: Tensors, place: Path) -> None:
    """Some systems read the .bin files first, others the safetensors."""
    both = tensors.keys() & pickled.keys()
    same = [name for name in both if np.array_equal(tensors[name], pickled[name])]
    if len(same) < len(tensors.keys() | pickled.keys()):
        differing = min((tensors.keys() | pickled.keys()) - set(same))
        raise UserError(f"pytorch_model.bin and model.safetensors differ in {differing} / {place} / remove one of them")


_OBJECTS = ("eagle_config", "eagle3_jax", "speculators_config", "transformer_layer_config")
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_norm", "bias")
_SWITCHES += ("use_aux_hidden_state", "tie_word_embeddings")
_COUNTS = ("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states")


def _check_types(raw: dict[str, Any], where: str) -> None:
    """UserError for a key of a draft that holds another type of JSON than it can mean anything in."""
    wrong = [(key, "an object") for key in _OBJECTS if not isinstance(raw.get(key), dict | None)]
    inner = {key: raw[key] for key in _OBJECTS if isinstance(raw.get(key), dict)}
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        wrong.append(("architectures", "a list of names"))
    served, own = inner.get("speculators_config", {}), inner.get("eagle3_jax", {})
    proposals = served.get("proposal_methods")
    for block, verifier in (("speculators_config", served.get("verifier")), ("eagle3_jax", own.get("verifier"))):
        if not isinstance(verifier, dict | None):
            wrong.append((f"{block}.verifier", "an object"))
        elif verifier and not isinstance(verifier.get("name_or_path"), str | None):
            wrong.append((f"{block}.verifier.name_or_path", "text"))
    if own.get("speculative_tokens") is not None and not _is_count(own["speculative_tokens"]):
        wrong.append(("eagle3_jax.speculative_tokens", "a count"))
    if proposals is not None and not (isinstance(proposals, list) and all(isinstance(p, dict) for p in proposals)):
        wrong.append(("speculators_config.proposal_methods", "a list of objects"))
    elif proposals and not _is_count(proposals[0].get("speculative_tokens", 1)):
        wrong.append(("speculators_config.proposal_methods: speculative_tokens", "a count"))
    facts = own.get("target")
    if not isinstance(facts, dict | None) or not isinstance((facts or {}).get("fingerprint"), dict | None):
        wrong.append(("eagle3_jax.target and its fingerprint", "objects"))
    else:
        sample = ((facts or {}).get("fingerprint") or {}).get("sample")
        if sample is not None and not (isinstance(sample, list) and all(type(x) in (int, float) for x in sample)):
            wrong.append(("eagle3_jax.target.fingerprint.sample", "a list of numbers"))
    for prefix, part in (("", raw), ("eagle_config.", inner.get("eagle_config", {}))):
        wrong += [(prefix + key, "true or false") for key in _SWITCHES if not isinstance(part.get(key), bool | None)]
        counts = {key: part.get(key) for key in _COUNTS}
        wrong += [(prefix + key, "a count") for key, n in counts.items() if n is not None and not _is_count(n)]
    if wrong:
        expected = ", ".join(f"{key} must be {kind}" for key, kind in wrong)
        raise UserError(f"{where} has values of a wrong type / {expected}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


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


def stored_layers(tensors: Mapping[str, np.ndarray]) -> set[str]:
    """The numbers, as written, of the layers that tensors belong to."""
    return {name.split(".")[1] for name in tensors if name.startswith("layers.")}


def write_folder(place: Path, config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors; the folder appears complete or not at all.

    An older draft at `place` is replaced; anything else there is a UserError.
    """
    check_destination(place)
    place = Path(os.path.realpath(place))  # a link stays a link, and `.` and `..` have a name
    temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(contiguous, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in temporary.iterdir():
            to_disk(file)
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
    old = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.old")
    os.replace(place, old)
    try:
        os.replace(new, place)
    except BaseException:
        os.replace(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


# What draft folders hold, whoever wrote them (speculators adds a config.py).
_DRAFT_FILES = re.compile(r"config\.json|config\.py|generation_config\.json|.*\.(safetensors|bin)(\.index\.json)?")


def check_destination(place: Path, source: Path | None = None) -> None:
    """UserError unless a draft may be written to `place`: nothing there, an empty folder, or a draft and nothing else.

    source: a draft that is being read, which must not lie at or below `place`.
    """
    real = Path(os.path.realpath(place))
    if source is not None and Path(os.path.realpath(source)).is_relative_to(real):
        same = "the same folder" if os.path.realpath(source) == str(real) else "one folder, the source inside it"
        raise UserError(f"source and destination are {same} / {source}, {place} / name another destination")
    if Path.cwd().is_relative_to(real):
        raise UserError(f"the destination is the current folder or above it / {real} / name a folder for the draft")
    if not real.exists():
        return
    if not real.is_dir():
        raise UserError(f"cannot write the draft / {place} / it is a file: name a folder")
    other = sorted(entry.name for entry in real.iterdir() if not _DRAFT_FILES.fullmatch(entry.name) or entry.is_dir())
    if any(real.iterdir()) and not _is_draft(real):
        raise UserError(f"{place} exists and is no draft folder / choose another path or remove it")
    if other:
        shown = ", ".join(other[:4])
        raise UserError(
            f"{place} holds more than a draft, {shown}, which would be lost / choose another path or move it"
        )


def _is_draft(place: Path) -> bool:
    """Whether config.json is that of a draft: every format names the draft vocabulary or the draft's own layout."""
    if not (place / "config.json").exists():
        return False
    raw = read_json(place / "config.json")
    return "speculators_model_type" in raw or "draft_vocab_size" in raw

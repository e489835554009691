"""Opening a draft that may be ill: what the loader refuses is exactly what the doctor is asked about.

A folder in speculators layout whose taps are missing or contradict each other, whose norm flags contradict its tensors
or whose vocabulary map is no map of offsets is opened as the servers would serve it, and the fault is told. Any other
refusal of the loader stands.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.data.vocabulary import check_map, to_offsets
from eagle3_jax.doctor.wiring import FLAGS, MAPS, Wiring
from eagle3_jax.draft.config import DraftConfig
from eagle3_jax.draft.draft import Draft, assemble, checkpoint_of, load_draft, read_checkpoint
from eagle3_jax.draft.folder import read_folder
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target, resolve
from eagle3_jax.models.weights import read_json
from eagle3_jax.taps import UnknownTaps, WiringError, paper_taps


@dataclass(frozen=True)
class Opened:
    """stored: the draft as its folder has it. declared: the wiring that a server would use.

    Its norms before fc are those its tensors have. maps: absolute target ids [Vd] by reading (a key of `wiring.MAPS`);
    the declared one need not be a valid map.
    faults: why the loader refuses the folder, in words; empty for a draft it accepts.
    """

    stored: Draft
    declared: Wiring
    maps: dict[str, np.ndarray]
    faults: list[str]
    speculative_tokens: int


def open_draft(path: str | Path, target: Target) -> Opened:
    """Loads a draft, mended as far as needed. Raises UserError or WiringError where the loader's refusal stands."""
    try:
        stored = load_draft(path)
        return _opened(stored, stored.config, to_offsets(stored.d2t), None, [], resolve(path))
    except (UserError, WiringError) as refusal:
        place = resolve(path)
        raw, tensors = read_folder(place)  # whose refusals stand: types, torn files
        if raw.get("speculators_model_type") != "eagle3":
            if not isinstance(refusal, UnknownTaps):
                raise
            return _with_likely_taps(place, target, refusal)
        flags = {flag: bool(raw.get(flag, False)) for flag in FLAGS}
        offsets, member = tensors.get("d2t"), tensors.get("t2d")
        try:
            faults = _mend_taps(raw, target)
            faults += _mend_norms(raw, tensors, raw.get("target_hidden_size") or target.config.hidden_size)
            faults += _mend_map(raw, tensors, target.config.vocab_size)
            stored = assemble(checkpoint_of(raw, tensors, place), str(place))
            declared = dataclasses.replace(stored.config, **flags)
        except (UserError, WiringError):
            raise refusal from None
        if not faults:
            raise
        return _opened(stored, declared, offsets, member, faults, place)


def _with_likely_taps(place: Path, target: Target, refusal: UnknownTaps) -> Opened:
    """A draft of another system that names no taps, or so that systems differ: its likeliest ones are declared."""
    taps = refusal.readings[0] if refusal.readings else paper_taps(target.num_layers)
    stored = assemble(read_checkpoint(place, taps, num_layers=target.num_layers), str(place))
    fault = f"{str(refusal).split(' / ')[0]}; taken here: {taps.words(target.num_layers)}"
    return _opened(stored, stored.config, to_offsets(stored.d2t), None, [fault], place)


def _opened(stored: Draft, declared: DraftConfig, offsets, member, faults: list[str], place: Path) -> Opened:
    maps = readings(offsets, member, stored.config.draft_vocab_size, stored.config.decoder.vocab_size)
    wiring = Wiring(declared, d2t=next(iter(maps)))
    return Opened(stored, wiring, maps, faults, _speculative_tokens(place))


def readings(offsets: np.ndarray | None, member: np.ndarray | None, size: int, vocab: int) -> dict[str, np.ndarray]:
    """Absolute target ids int32 [size] by reading: the declared one first, then all others that are valid maps.

    offsets: d2t as stored, any integers [size], or None; member: t2d, or None.
    """
    count = np.arange(size)
    found = {}
    if offsets is not None:
        stored = np.asarray(offsets, np.int64)
        found = {"offsets": stored + count, "absolute": stored, "offsets of offsets": stored + 2 * count}
    if member is not None and member.sum() == size:
        found["t2d"] = np.flatnonzero(member)
    found["none"] = count
    declared = next(iter(found)) if offsets is not None else "none"
    kept = {declared: np.asarray(found[declared]).clip(-1, vocab).astype(np.int32)}
    for name in MAPS:
        if name in found and is_map(found[name], vocab) and not _among(found[name], kept):
            kept[name] = found[name].astype(np.int32)
    return kept


def is_map(absolute: np.ndarray, vocab: int) -> bool:
    """Whether int [Vd] are distinct target ids."""
    inside = absolute.min() >= 0 and absolute.max() < vocab
    return bool(inside and np.unique(absolute).size == absolute.size)


def _among(absolute: np.ndarray, maps: dict[str, np.ndarray]) -> bool:
    return any(np.array_equal(absolute, other) for other in maps.values())


def _mend_taps(raw: dict[str, Any], target: Target) -> list[str]:
    """Leaves one statement of the taps in `raw`: the key that vLLM reads, else our own, else what vLLM would assume."""
    key = "eagle_aux_hidden_state_layer_ids"
    stated, block = raw.get(key), raw.get("eagle3_jax") or {}
    own = block.get("taps")
    if block.get("taps_convention", "block-input") != "block-input":
        return []
    raw["eagle3_jax"] = {k: v for k, v in block.items() if k not in ("taps", "taps_convention")}
    if stated is not None and own is not None and stated != own:
        return [f"config.json states two tap lists: {key} {stated} and eagle3_jax.taps {own}"]
    if stated is None and own is None:
        raw[key] = list(paper_taps(target.num_layers))  # for shallow targets there are none: a UserError
        return [f"config.json names no taps ({key}); servers then assume {raw[key]}"]
    raw[key] = own if stated is None else stated
    return []


def _mend_norms(raw: dict[str, Any], tensors: dict[str, np.ndarray], hidden: int) -> list[str]:
    """Sets the flags of the norms before fc to what the tensors say; the declared wiring keeps what the config says."""
    stated = raw.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(stated, list) or "fc.weight" not in tensors:
        return []
    faults, taps = [], len(stated)
    weights = {"norm_before_fc": {"input_norm.weight": taps * hidden}}
    weights["fc_norm"] = {f"fc_norm.{i}.weight": hidden for i in range(taps)}
    there = [flag for flag, sizes in weights.items() if all(name in tensors for name in sizes)]
    for flag, sizes in weights.items():
        if flag in there and not raw.get(flag):
            faults.append(f"{flag} is off in config.json, yet the file holds its weights ({next(iter(sizes))})")
            raw.update(dict.fromkeys(weights, False) | {flag: True})
        elif raw.get(flag) and not there:
            faults.append(f"{flag} is on in config.json, yet its weights ({next(iter(sizes))}) are missing: ones serve")
            tensors.update({name: np.ones(size, tensors["fc.weight"].dtype) for name, size in sizes.items()})
    return faults


def _mend_map(raw: dict[str, Any], tensors: dict[str, np.ndarray], vocab: int) -> list[str]:
    """Replaces a vocabulary map that the loader refuses by one of its valid readings, so that the rest can load."""
    size, offsets, member = raw.get("draft_vocab_size") or vocab, tensors.get("d2t"), tensors.get("t2d")
    if size > vocab or (offsets is None and size == vocab) or (offsets is not None and offsets.shape != (size,)):
        return []
    try:
        if offsets is None:
            raise UserError(f"the draft vocabulary has {size} of {vocab} tokens but there is no d2t map")
        check_map(offsets, member, vocab)
    except UserError as error:
        valid = [m for m in readings(offsets, member, size, vocab).values() if is_map(m, vocab)]
        tensors["d2t"] = to_offsets(valid[0])
        tensors.pop("t2d", None)
        return [str(error)]
    return []


def _speculative_tokens(place: Path) -> int:
    """The number of draft tokens a speculators config proposes; 3, the writer's default, elsewhere."""
    raw = read_json(place / "config.json")
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens") or 3

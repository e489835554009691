"""What a draft folder holds, for people (`render`) and programs (`inspect`): wiring, flags, map, rope, and what servers
would do with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.detect import FORMATS, detect
from convert.servers import Folder, findings
from convert.target import TargetFacts
from eagle3_jax.data.vocabulary import to_offsets
from eagle3_jax.draft.config import NORM_FLAGS
from eagle3_jax.draft.draft import Draft, assemble, read_checkpoint
from eagle3_jax.draft.folder import canonical_names, read_folder
from eagle3_jax.models.weights import shorten
from eagle3_jax.taps import TapSet, UnknownTaps, likely_taps


def inspect(
    place: Path, taps: TapSet | None = None, convention: str | None = None, target: TargetFacts | None = None
) -> dict[str, Any]:
    """Everything that can be said about a draft folder; taps that the file leaves open are null, with likely readings.

    Raises UserError for what is no draft, another kind of draft, or torn.
    """
    raw, stored = read_folder(place)
    layout = detect(raw, stored, str(place))
    num_layers = target.num_layers if target else None
    why, readings = None, []
    try:
        checkpoint = read_checkpoint(place, taps, convention, num_layers)
    except UnknownTaps as error:
        why, readings = str(error), [list(reading) for reading in error.readings or likely_taps(num_layers)]
        checkpoint = read_checkpoint(place, _placeholder(raw, stored, str(place), error), convention, num_layers)
    draft = assemble(checkpoint, str(place))
    known = why is None
    if known and target is not None:
        target.check(draft)
    if num_layers is None:
        num_layers = ((checkpoint.facts.get("target") or {}).get("fingerprint") or {}).get("num_layers")
    folder = Folder(draft, raw, frozenset(stored), layout, known, num_layers)
    return {
        "path": str(place),
        "format": layout,
        "formats": list(FORMATS),
        "architecture": (raw.get("architectures") or [None])[0],
        "taps": list(draft.taps) if known else None,
        "taps_in_words": draft.taps.words(num_layers) if known else None,
        "taps_unknown": why,
        "likely_taps": readings,
        "ids_in_file": {
            "eagle_aux_hidden_state_layer_ids": folder.top_ids,
            "eagle_config.eagle_aux_hidden_state_layer_ids": folder.nested_ids,
            "eagle3_jax.taps": (raw.get("eagle3_jax") or {}).get("taps"),
        },
        "source_words": _source_words(folder),
        "flags": _flags(draft),
        "shape": _shape(draft),
        "vocabulary": _vocabulary(draft, canonical_names(stored, str(place))),
        "rope": {**draft.config.decoder.rope.to_hf(), "max_position_embeddings": draft.config.decoder.max_positions},
        "dtype": sorted({str(array.dtype) for name, array in stored.items() if name not in ("d2t", "t2d")}),
        "verifier": (checkpoint.facts.get("verifier") or {}).get("name_or_path"),
        "speculative_tokens": checkpoint.facts.get("speculative_tokens"),
        "target": checkpoint.facts.get("target"),
        "borrows": draft.missing,
        "servers": findings(folder),
        "notes": notes_on(folder, target) + _broken(not_finite(stored)),
    }


def not_finite(stored: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    return sorted(name for name, array in stored.items() if not np.isfinite(array).all())


def _broken(names: list[str]) -> list[str]:
    return [f"{shorten(names)} holds NaN or infinity: no server can propose anything from it"] if names else []


def _placeholder(raw: dict[str, Any], stored, where: str, error: UnknownTaps) -> TapSet:
    """Taps to read the rest of a draft whose taps are unknown, never shown: a reading of the ids the file has, so that
    they are what is compared with its fc; else as many as its fc is wide."""
    if error.readings and (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        return error.readings[0]
    fc = canonical_names(stored, where).get("fc.weight")
    layer = raw.get("transformer_layer_config") or raw
    width = raw.get("target_hidden_size") or layer.get("hidden_size") or 1
    count = max(fc.shape[-1] // width, 1) if fc is not None and fc.ndim == 2 else 1
    return next((reading for reading in error.readings if len(reading) == count), TapSet(range(count)))


def _source_words(folder: Folder) -> str:
    """The ids as the source's own system means them."""
    if folder.nested_ids is not None:
        return f"eagle_config ids {folder.nested_ids}: id k is the output of block k where the first id is 1 (SGLang)"
    if folder.top_ids is not None:
        return f"top-level ids {folder.top_ids}: id k is the input of block k (vLLM, speculators)"
    if folder.format == "safeailab":
        return "no ids: SafeAILab's code reads the inputs of blocks 2, N//2 and N-3"
    return "no ids"


def _flags(draft: Draft) -> dict[str, Any]:
    config = draft.config
    return {
        **{flag: getattr(config, flag) for flag in NORM_FLAGS},
        "use_aux_hidden_state": config.use_aux_hidden_state,
        "fc_bias": config.fc_bias,
        "attention_bias": config.decoder.attention_bias,
        "mlp_bias": config.decoder.mlp_bias,
        "qk_norm": config.decoder.qk_norm,
        "sliding_window": list(config.decoder.windows) or None,
    }


def _shape(draft: Draft) -> dict[str, Any]:
    decoder = draft.config.decoder
    return {
        "layers": decoder.num_layers,
        "hidden_size": decoder.hidden_size,
        "target_hidden_size": draft.config.target_hidden_size,
        "heads": decoder.num_heads,
        "kv_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": decoder.intermediate_size,
    }


def _vocabulary(draft: Draft, stored) -> dict[str, Any]:
    identity = bool(np.array_equal(draft.d2t, np.arange(draft.config.decoder.vocab_size)))
    ascending = bool(np.all(np.diff(draft.d2t) > 0))
    health = "identity" if identity else "ascending" if ascending else "in another order (as ModelOpt writes it)"
    return {
        "draft": draft.config.draft_vocab_size,
        "target": draft.config.decoder.vocab_size,
        "d2t": "d2t" in stored,
        "t2d": "t2d" in stored,
        "ascending": ascending,
        "health": f"{health}, in range, no id twice" + (", agrees with t2d" if "t2d" in stored else ""),
    }


def notes_on(folder: Folder, target: TargetFacts | None) -> list[str]:
    """What a reader of the folder should know or ask, one sentence each."""
    notes, rope = [], folder.draft.config.decoder.rope
    reach = folder.draft.config.decoder.max_positions
    if target is not None and target.max_positions and reach < target.max_positions:
        notes.append(
            f"has max_position_embeddings {reach}, its target {target.max_positions}: some servers size a table by it "
            "and fail on longer prompts; here positions are computed as they come"
        )
    foreign = "eagle3_jax" not in folder.raw
    if folder.format == "safeailab" and foreign and folder.raw.get("rope_theta") not in (None, 10000.0):
        notes.append(
            "SafeAILab's training ignores rope_theta and rotates by 10000, its inference uses the stated "
            f"{rope.theta:g}: if the draft was trained there, correct the key; `eagle3 doctor` measures which"
        )
    if folder.format == "modelopt" and foreign:
        notes.append(
            "ModelOpt's training since December 2025 norms the hidden state twice in the first layer, by its code; "
            "servers, and this project, norm it once: compare the acceptance with the training's"
        )
    if folder.format == "modelopt" and rope.kind == "yarn":
        notes.append("ModelOpt can write YaRN into the export of a draft trained with plain rope: ask how it was made")
    if folder.format != "speculators" and foreign and folder.raw.get("norm_output"):
        notes.append(
            "norm_output is read as SGLang, vLLM and speculators do (the normed hidden is fed back); SpecForge means "
            "the norm before lm_head by it and always feeds back the un-normed hidden"
        )
    early = str(folder.raw.get("speculators_version")).split(".")[:2] in (["0", "3"], ["0", "4"])
    if early and foreign and folder.top_ids == list(folder.draft.taps):
        later = [i + 1 for i in folder.top_ids]
        notes.append(
            "speculators 0.3 and 0.4 captured training data one block later than vLLM serves: a draft trained on such "
            f"data reads {later} (--convention block-output), not {folder.top_ids}; `eagle3 doctor` measures which"
        )
    if _reads_both_ways(folder):
        notes.append(
            "d2t has no t2d beside it and would be a valid map of absolute ids as well; it is read as offsets, as all "
            "systems do: if the draft is rarely right, let `eagle3 doctor` measure which"
        )
    if folder.draft.missing:
        notes.append(f"stores no {', '.join(folder.draft.missing)}: lent by the target")
    if not folder.draft.config.use_aux_hidden_state:
        notes.append("reads the target's last hidden state after the final norm")
    return notes


def _reads_both_ways(folder: Folder) -> bool:
    """Whether nothing in the file tells offsets from absolute ids: no t2d, and the offsets are distinct target ids."""
    offsets, vocab = to_offsets(folder.draft.d2t), folder.draft.config.decoder.vocab_size
    reduced = len(offsets) < vocab and not folder.stores("t2d")
    return reduced and len(np.unique(offsets)) == len(offsets) and offsets.min() >= 0 and offsets.max() < vocab


def render(found: dict[str, Any]) -> str:
    """The inspection as lines of text."""
    taps, flags = found["taps"], dict(found["flags"])
    shape, vocabulary, rope = found["shape"], found["vocabulary"], found["rope"]
    uses_aux = flags.pop("use_aux_hidden_state")
    named = [name if value is True else f"{name} {value}" for name, value in flags.items() if value]
    named += [] if uses_aux else ["use_aux_hidden_state false"]
    lines = [
        f"format      {found['format']} ({found['architecture']})",
        f"taps        {taps} = {found['taps_in_words']}" if taps else f"taps        unknown: {found['taps_unknown']}",
        f"in the file {found['source_words']}",
        f"flags       {', '.join(named) or 'none'}",
        f"shape       {shape['layers']} layer(s), hidden {shape['hidden_size']}, target {shape['target_hidden_size']}, "
        f"{shape['heads']} heads of {shape['head_dim']}, {shape['kv_heads']} kv heads",
        f"vocabulary  {vocabulary['draft']} of {vocabulary['target']}: {vocabulary['health']}",
        f"rope        {rope['rope_type']}, theta {rope['rope_theta']:g}, {rope['max_position_embeddings']} positions",
        f"dtype       {', '.join(found['dtype'])}",
        f"verifier    {found['verifier'] or 'not named'}",
    ]
    lines += [f"note        {note}" for note in found["notes"]]
    for server, sentences in found["servers"].items():
        lines += [f"{server:<13} {sentence}" for sentence in sentences or ["serves it as trained"]]
    return "\n".join(lines)

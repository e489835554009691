"""A loaded draft: configuration, parameters, vocabulary map; reading and writing the speculators layout."""

import dataclasses
import functools
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from eagle3_jax.data.vocabulary import check_map, t2d, to_absolute, to_offsets
from eagle3_jax.draft.config import DraftConfig, draft_config_from_speculators, draft_config_to_speculators
from eagle3_jax.draft.network import DraftModel
from eagle3_jax.draft.ttt import document_positions, ttt_forward
from eagle3_jax.errors import UserError
from eagle3_jax.models.fingerprint import differing_facts, same_weights
from eagle3_jax.models.target import Target, checked_ids, resolve
from eagle3_jax.models.weights import (
    Graph,
    Params,
    abstract_params,
    fill,
    flatten,
    read_json,
    read_tensors,
    safetensors_files,
)
from eagle3_jax.taps import Taps, TapSet

EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Draft:
    """A draft. d2t: int32 [Vd], the target id of each draft id (absolute). facts: verifier, target, training facts."""

    config: DraftConfig
    graph: Graph
    params: Params
    d2t: np.ndarray
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def taps(self) -> TapSet:
        return self.config.taps

    @property
    def dtype(self):
        return self.params["fc"]["weight"].dtype

    @property
    def is_bound(self) -> bool:
        return "embed_tokens" in self.params

    def bind(self, target: Target) -> "Draft":
        """Checks that the draft fits the target and gives it the target's embedding if it stores none.

        Raises UserError on another hidden size, vocabulary, block count or tokenizer, WiringError on a missing tap.
        Other weights of the same shape are a warning (printed by the caller from `binding_warning`).
        """
        check_binding(self, target)
        if self.is_bound:
            return self
        embedding = target.params["model"]["embed_tokens"]["weight"]
        return self.with_params({**self.params, "embed_tokens": {"weight": embedding.astype(self.dtype)}})

    def with_params(self, params: Params) -> "Draft":
        return dataclasses.replace(self, params=params)

    def ttt_forward(self, features: Taps, ids, steps: int, positions=None, document_ids=None) -> list[jax.Array]:
        """The training graph: draft logits of each step, `steps` arrays [B, T-1, Vd] (see `draft.ttt`).

        features: Taps of [B, T, H], unshifted, as are ids, positions and document_ids [B, T]. positions default to
        0.. restarting per document. Raises WiringError when features hold other taps than the draft reads.
        """
        if not self.is_bound:
            raise UserError("the draft stores no embedding / call draft.bind(target) first")
        ids = checked_ids(ids, self.config.decoder.vocab_size)
        documents = jnp.zeros_like(ids) if document_ids is None else jnp.asarray(np.asarray(document_ids), jnp.int32)
        positions = (
            document_positions(documents) if positions is None else jnp.asarray(np.asarray(positions), jnp.int32)
        )
        return _ttt_forward(self.graph, steps, self.params, features, ids, positions, documents)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ttt_forward(graph, steps, params, features, ids, positions, documents):
    logits, _ = ttt_forward(graph.merge(params), features, ids, positions, documents, steps)
    return logits


def check_binding(draft: Draft, target: Target) -> None:
    """Refuses a draft that cannot belong to this target."""
    config, facts = draft.config, draft.facts.get("target", {})
    config.taps.check(target.num_layers)
    differing = differing_facts(facts.get("fingerprint", {}), target.fingerprint)
    if config.target_hidden_size != target.config.hidden_size:
        differing.append(f"hidden_size {config.target_hidden_size} against {target.config.hidden_size}")
    if config.decoder.vocab_size != target.config.vocab_size:
        differing.append(f"vocab_size {config.decoder.vocab_size} against {target.config.vocab_size}")
    if differing:
        unique = "; ".join(dict.fromkeys(differing))
        raise UserError(f"the draft belongs to another target: {unique} / {target.path} / choose its own target")
    ours, theirs = facts.get("tokenizer_fingerprint"), target.tokenizer_fingerprint
    if ours and theirs and ours != theirs:
        raise UserError(f"the draft was trained with another tokenizer ({ours} against {theirs}) / {target.path}")
    if not draft.is_bound and config.decoder.hidden_size != target.config.hidden_size:
        raise UserError("the draft stores no embedding and its hidden size differs from the target's, so none fits")


def binding_warning(draft: Draft, target: Target) -> str | None:
    """One line when the shapes fit but the weights are not those the draft was trained for, else None."""
    facts = draft.facts.get("target", {})
    fingerprint = facts.get("fingerprint")
    if fingerprint and same_weights(fingerprint, target.fingerprint):
        return None
    name = facts.get("hub_id") or draft.facts.get("verifier", {}).get("name_or_path") or "an unnamed target"
    reason = "has no fingerprint" if not fingerprint else "was trained on other weights"
    return f"warning: the draft (for {name}) {reason}; serving it on {target.path} may accept fewer tokens"


def new_draft(config: DraftConfig, params: Params, d2t: np.ndarray, facts: dict[str, Any]) -> Draft:
    graph, _ = draft_graph(config)
    return Draft(config, graph, params, np.asarray(d2t, np.int32), facts)


def draft_graph(config: DraftConfig) -> tuple[Graph, dict[str, tuple[int, ...]]]:
    """The network's graph and {checkpoint name: shape}, nothing allocated."""
    return abstract_params(nnx.eval_shape(lambda: DraftModel(config)))


def load_draft(path: str | Path, dtype: str | None = None, taps=None, target: Target | None = None) -> Draft:
    """Loads a draft folder in speculators layout.

    dtype: None keeps the stored one. taps: ids a file lacks; contradicting the file raises WiringError. target: binds
    at once. Every tensor must be used and every shape agree; the verifier's path is never resolved.
    """
    place = resolve(path)
    raw, tensors = read_json(place / "config.json"), dict(read_tensors(safetensors_files(place)))
    draft = draft_from_tensors(raw, tensors, str(place), dtype, None if taps is None else TapSet(taps))
    return draft if target is None else draft.bind(target)


def draft_from_tensors(
    raw: dict[str, Any],
    tensors: dict[str, np.ndarray],
    where: str,
    dtype: str | None = None,
    taps: TapSet | None = None,
) -> Draft:
    """A draft from the content of a speculators folder: its config.json and its tensors by name. See `load_draft`."""
    config = draft_config_from_speculators(raw, f"{where}/config.json", taps)
    tensors = dict(tensors)
    graph, shapes = draft_graph(config)
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    d2t = _vocabulary_map(config, offsets, mask, where)
    _check_fc(config, tensors, where)
    if EMBEDDING not in tensors:
        shapes.pop(EMBEDDING)
    params = fill(shapes, tensors.items(), None if dtype is None else jnp.dtype(dtype), where)
    facts = {**(raw.get("eagle3_jax") or {}), "verifier": (raw.get("speculators_config") or {}).get("verifier") or {}}
    return Draft(config, graph, params, d2t, facts)


def _vocabulary_map(config: DraftConfig, offsets, mask, where: str) -> np.ndarray:
    size, vocab = config.draft_vocab_size, config.decoder.vocab_size
    if offsets is None:
        if size != vocab:
            raise UserError(f"the draft vocabulary has {size} of {vocab} tokens but there is no d2t map / {where}")
        return np.arange(size, dtype=np.int32)
    if offsets.shape != (size,):
        raise UserError(f"d2t has {offsets.shape[0]} entries, draft_vocab_size is {size} / {where}")
    check_map(offsets, mask, vocab)
    return np.asarray(to_absolute(offsets), np.int32)


def _check_fc(config: DraftConfig, tensors: dict[str, np.ndarray], where: str) -> None:
    width = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else None
    if width is not None and width != len(config.taps) * config.target_hidden_size:
        count = width / config.target_hidden_size
        raise UserError(
            f"the config names {len(config.taps)} taps {list(config.taps)} but fc.weight is {width} wide, which is "
            f"{count:g} taps of {config.target_hidden_size} / {where} / the taps or the weights are of another draft"
        )


def save_draft(draft: Draft, path: str | Path, speculative_tokens: int = 3) -> None:
    """Writes config.json and model.safetensors in speculators layout; the folder appears complete or not at all."""
    place = Path(path)
    facts = {key: value for key, value in draft.facts.items() if key != "verifier"}
    verifier = draft.facts.get("verifier") or {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}
    config = draft_config_to_speculators(draft.config, str(draft.dtype), speculative_tokens, verifier, facts)
    tensors = {name: np.ascontiguousarray(jax.device_get(array)) for name, array in flatten(draft.params).items()}
    if not np.array_equal(draft.d2t, np.arange(draft.config.decoder.vocab_size)):
        tensors["d2t"] = np.asarray(to_offsets(draft.d2t), np.int64)
        tensors["t2d"] = t2d(draft.d2t, draft.config.decoder.vocab_size)
    temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
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
    is_draft = (place / "config.json").exists() and "speculators_model_type" in read_json(place / "config.json")
    if not is_draft and any(place.iterdir()):
        raise UserError(f"{place} exists and is no draft folder / choose another path or remove it")
    old = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.old")
    os.replace(place, old)
    os.replace(new, place)
    shutil.rmtree(old, ignore_errors=True)

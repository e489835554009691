"""A loaded draft: configuration, parameters, vocabulary map; reading any known format, writing speculators layout."""

import dataclasses
import functools
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.data.vocabulary import check_map, t2d, to_absolute, to_offsets
from eagle3_jax.draft.config import DraftConfig, draft_config_from_speculators, draft_config_to_speculators
from eagle3_jax.draft.folder import Tensors, canonical_names, read_folder, stored_layers, write_folder
from eagle3_jax.draft.network import DraftModel
from eagle3_jax.draft.ttt import document_positions, ttt_forward
from eagle3_jax.errors import UserError
from eagle3_jax.models.fingerprint import differing_facts, same_weights
from eagle3_jax.models.target import Target, checked_ids, resolve
from eagle3_jax.models.weights import FLOATS, Graph, Params, abstract_params, checked_dtype, fill, flatten
from eagle3_jax.sharding import ONE_DEVICE, Placement
from eagle3_jax.taps import Taps, TapSet, require_taps

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_LENT = "target_norm."  # parameters that only a target gives; no file holds them


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
        return self.params["layers"][0]["self_attn"]["q_proj"]["weight"].dtype

    @property
    def chat_template(self) -> dict[str, Any]:
        """Variables that chats were rendered with in training, besides the messages: serving must use the same."""
        training = self.facts.get("training")
        variables = training.get("chat_template") if isinstance(training, dict) else None
        return variables if isinstance(variables, dict) else {}

    @property
    def missing(self) -> list[str]:
        """Parts that the file lacks and only a target can lend: its embedding, head or final norm."""
        parts = ["embed_tokens", "lm_head"] + ["target_norm"] * (not self.config.use_aux_hidden_state)
        return [part for part in parts if part not in self.params]

    @property
    def is_bound(self) -> bool:
        return not self.missing

    def bind(self, target: Target) -> "Draft":
        """Checks that the draft fits the target and lends it the target's embedding, head or norm if it stores none.
        Its parameters go to the devices of the target's, unless they are there.

        Raises UserError on another hidden size, vocabulary, block count or tokenizer, WiringError on a missing tap.
        Other weights of the same shape are a warning (printed by the caller from `binding_warning`).
        """
        check_binding(self, target)
        if self.is_bound:
            return self if target.placement.mesh is None else self.with_params(target.placement.weights(self.params))
        model = target.params["model"]
        lent = {
            "embed_tokens": model["embed_tokens"],
            "lm_head": {"weight": target.params.get("lm_head", model["embed_tokens"])["weight"][jnp.asarray(self.d2t)]},
            "target_norm": {"weight": target.final_norm, "eps": jnp.float32(target.config.rms_norm_eps)},
        }
        parts = {part: jax.tree.map(lambda a: a.astype(self.dtype), lent[part]) for part in self.missing}
        return self.with_params(target.placement.weights({**self.params, **parts}))

    def with_params(self, params: Params) -> "Draft":
        return dataclasses.replace(self, params=params)

    def ttt_forward(self, features: Taps, ids, steps: int, positions=None, document_ids=None) -> list[jax.Array]:
        """The training graph: draft logits of each step, `steps` arrays [B, T-1, Vd] (see `draft.ttt`).

        features: Taps of [B, T, H], unshifted, as are ids, positions and document_ids [B, T]. positions default to
        0.. restarting per document. Raises WiringError when features hold other taps than the draft reads or do not
        say which, UserError for shapes that do not go together.
        """
        if not self.is_bound:
            parts = ", ".join(_IN_WORDS[part] for part in self.missing)
            raise UserError(f"the draft stores no {parts} / draft = draft.bind(target) lends it")
        ids = checked_ids(ids, self.config.decoder.vocab_size)
        _check_features(features, ids.shape, self.config.target_hidden_size)
        if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
            raise UserError(f"steps {steps!r} / give a number of draft steps from 1 on")
        documents = jnp.zeros_like(ids) if document_ids is None else _like_ids("document_ids", document_ids, ids.shape)
        positions = document_positions(documents) if positions is None else _like_ids("positions", positions, ids.shape)
        return _ttt_forward(self.graph, steps, self.params, features, ids, positions, documents)


_IN_WORDS = {"embed_tokens": "embedding", "lm_head": "lm_head", "target_norm": "final norm of the target"}


def _check_features(features: Any, shape: tuple[int, int], hidden_size: int) -> None:
    require_taps(features)
    found = features.arrays[0].shape
    if shape[1] < 2 or found != (*shape, hidden_size):
        raise UserError(
            f"features of shape {list(found)} for token ids of shape {list(shape)} / each tap is [batch, tokens, "
            f"{hidden_size}], unshifted, for the same 2 or more tokens"
        )


def _like_ids(name: str, values: Any, shape: tuple[int, int]) -> jax.Array:
    array = np.asarray(values)
    if array.shape not in (shape, (1, shape[1])) or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{name} are {array.dtype} {list(array.shape)} / give integers {list(shape)}, as token ids")
    return jnp.asarray(np.broadcast_to(array, shape), jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ttt_forward(graph, steps, params, features, ids, positions, documents):
    return ttt_forward(graph.merge(params), features, ids, positions, documents, steps)


def check_binding(draft: Draft, target: Target) -> None:
    """Refuses a draft that cannot belong to this target."""
    config, facts = draft.config, draft.facts.get("target") or {}
    config.taps.check(target.num_layers)
    differing = differing_facts(facts.get("fingerprint") or {}, target.fingerprint)
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
    wide = [part for part in draft.missing if part != "target_norm"]
    if wide and config.decoder.hidden_size != target.config.hidden_size:
        parts = " and no ".join(_IN_WORDS[part] for part in wide)
        raise UserError(f"the draft stores no {parts} and its hidden size differs from the target's, so none fits")


def binding_warning(draft: Draft, target: Target) -> str | None:
    """One line when the shapes fit but the weights are not those the draft was trained for, else None."""
    facts, verifier = draft.facts.get("target") or {}, draft.facts.get("verifier") or {}
    fingerprint = facts.get("fingerprint")
    if not fingerprint:
        reason = "has no fingerprint"
    elif not same_weights(fingerprint, target.fingerprint):
        reason = "was trained on other weights"
    elif fingerprint.get("quantize") != target.quantize:
        kept = fingerprint.get("quantize") or "not quantised"
        reason = f"was trained on this target's weights {kept}, here they are {target.quantize or 'not quantised'}"
    else:
        return None
    name = facts.get("hub_id") or verifier.get("name_or_path") or "an unnamed target"
    return f"warning: the draft (for {name}) {reason}; serving it on {target.path} may accept fewer tokens"


def new_draft(config: DraftConfig, params: Params, d2t: np.ndarray, facts: dict[str, Any]) -> Draft:
    graph, _ = draft_graph(config)
    return Draft(config, graph, params, np.asarray(d2t, np.int32), facts)


@functools.lru_cache(maxsize=64)  # a tenth of a second each
def draft_graph(config: DraftConfig) -> tuple[Graph, dict[str, tuple[int, ...]]]:
    """The network's graph and {checkpoint name: shape}, nothing allocated."""
    return abstract_params(nnx.eval_shape(lambda: DraftModel(config)))


@dataclass(frozen=True)
class Checkpoint:
    """A draft as read from a file, in canonical form: tensors by our names, d2t and t2d as stored among them.

    facts: verifier, target, training facts, speculative_tokens.
    """

    config: DraftConfig
    tensors: Tensors
    facts: dict[str, Any]


def load_draft(path: str | Path, dtype: str | None = None, taps=None, target: Target | None = None) -> Draft:
    """Loads a draft folder of any known format, detected by content (speculators, SGLang, SafeAILab, ModelOpt).

    dtype: None keeps the stored one. taps: ids a file lacks; contradicting the file raises WiringError. target: binds
    at once. Every tensor must be used and every shape agree; the verifier's path is never resolved.
    """
    place = resolve(path, also=("pytorch_model*.bin",))
    given = None if taps is None else TapSet(taps)
    checkpoint = read_checkpoint(place, given, num_layers=target.num_layers if target else None)
    draft = assemble(checkpoint, str(place), dtype, ONE_DEVICE if target is None else target.placement)
    return draft if target is None else draft.bind(target)


def read_checkpoint(
    place: Path, taps: TapSet | None = None, convention: str | None = None, num_layers: int | None = None
) -> Checkpoint:
    """A draft folder's content in canonical form. convention, num_layers: see `taps.resolve_taps`."""
    raw, stored = read_folder(place)
    checkpoint = checkpoint_of(raw, stored, place, taps, convention, num_layers)
    refuse_unset_map(checkpoint, str(place))
    return checkpoint


def refuse_unset_map(checkpoint: Checkpoint, where: str) -> None:
    """UserError for a reduced vocabulary whose d2t is all zeros and which no t2d confirms: a buffer never filled in."""
    offsets = checkpoint.tensors.get("d2t")
    size, vocab = checkpoint.config.draft_vocab_size, checkpoint.config.decoder.vocab_size
    if offsets is not None and size < vocab and "t2d" not in checkpoint.tensors and not offsets.any():
        raise UserError(
            f"d2t is all zeros, so the {size} draft tokens would be the target's first {size} of {vocab}, and there is "
            f"no t2d to confirm it / {where} / store the map that the draft was trained with, or a t2d that agrees"
        )


def checkpoint_of(
    raw: dict[str, Any],
    stored: Tensors,
    place: Path,
    taps: TapSet | None = None,
    convention: str | None = None,
    num_layers: int | None = None,
) -> Checkpoint:
    """A draft's config.json and tensors, by their stored names, in canonical form. place: for messages."""
    where = str(place / "config.json")
    from convert.detect import read_foreign, refuse_other_kinds  # which imports this module

    if "speculators_model_type" not in raw and "transformer_layer_config" not in raw:
        return read_foreign(raw, stored, str(place), taps, convention, num_layers)
    refuse_other_kinds(raw, stored, str(place))
    tensors = canonical_names(stored, str(place))
    shapes = {name: tuple(array.shape) for name, array in tensors.items()}
    config = draft_config_from_speculators(raw, where, taps, shapes, convention, num_layers)
    served = raw.get("speculators_config") or {}
    facts = {**(raw.get("eagle3_jax") or {}), "verifier": served.get("verifier") or {}}
    proposals = served.get("proposal_methods") or []
    if proposals:
        facts["speculative_tokens"] = proposals[0].get("speculative_tokens")
    return Checkpoint(config, tensors, facts)


def assemble(checkpoint: Checkpoint, where: str, dtype: str | None = None, placement: Placement = ONE_DEVICE) -> Draft:
    """The draft of a checkpoint, on the devices of the placement. Raises UserError for a map, tensor or shape that does
    not fit."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    _check_layers(config, tensors, where)  # before a network of as many is made
    graph, shapes = draft_graph(config)
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    d2t = _vocabulary_map(config, offsets, mask, where)
    _check_fc(config, tensors, where)
    full = config.draft_vocab_size == config.decoder.vocab_size
    other = [name for name, array in tensors.items() if str(array.dtype) not in FLOATS]
    if other:
        raise UserError(
            f"{other[0]} is {tensors[other[0]].dtype} / {where} / weights must be {', '.join(FLOATS)}; a quantised or "
            "double-precision draft has to be stored in one of them"
        )
    optional = {EMBEDDING} | ({HEAD} if full else set())
    shapes = {n: s for n, s in shapes.items() if not n.startswith(_LENT) and (n in tensors or n not in optional)}
    own = None if dtype is None else checked_dtype(dtype)
    params = fill(shapes, tensors.items(), own, where, placement=placement)
    return Draft(config, graph, params, d2t, checkpoint.facts)


def _check_layers(config: DraftConfig, tensors: Tensors, where: str) -> None:
    expected, stored = config.decoder.num_layers, stored_layers(tensors)
    if expected > len(stored):
        raise UserError(f"num_hidden_layers is {expected} but the file holds tensors of {len(stored)} layers / {where}")


def _vocabulary_map(config: DraftConfig, offsets, mask, where: str) -> np.ndarray:
    size, vocab = config.draft_vocab_size, config.decoder.vocab_size
    if offsets is None:
        if size != vocab:
            raise UserError(f"the draft vocabulary has {size} of {vocab} tokens but there is no d2t map / {where}")
        return np.arange(size, dtype=np.int32)
    if offsets.shape != (size,):
        raise UserError(f"d2t has {offsets.size} entries, draft_vocab_size is {size} / {where}")
    try:
        check_map(offsets, mask, vocab)
    except UserError as error:
        raise UserError(f"{error} / {where}") from error
    return np.asarray(to_absolute(offsets), np.int32)


def _check_fc(config: DraftConfig, tensors: Tensors, where: str) -> None:
    fc = tensors.get("fc.weight")
    width = fc.shape[-1] if fc is not None and fc.ndim == 2 else None  # another rank is refused with its shape
    if width is not None and width != len(config.taps) * config.target_hidden_size:
        count = width / config.target_hidden_size
        raise UserError(
            f"the config names {len(config.taps)} taps {list(config.taps)} but fc.weight is {width} wide, which is "
            f"{count:g} taps of {config.target_hidden_size} / {where} / the taps or the weights are of another draft"
        )


def save_draft(draft: Draft, path: str | Path, speculative_tokens: int | None = None) -> None:
    """Writes config.json and model.safetensors in speculators layout; the folder appears complete or not at all.

    speculative_tokens: chain length for servers; None = as loaded, else 3.
    """
    tokens = speculative_tokens or draft.facts.get("speculative_tokens") or 3
    verifier = draft.facts.get("verifier") or {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}
    config = draft_config_to_speculators(draft.config, str(draft.dtype), tokens, verifier, own_facts(draft))
    write_folder(Path(path), config, stored_tensors(draft))


def own_facts(draft: Draft) -> dict[str, Any]:
    """What of the draft's facts goes into the `eagle3_jax` block; the rest has keys of its own."""
    return {key: value for key, value in draft.facts.items() if key not in ("verifier", "speculative_tokens")}


def stored_tensors(draft: Draft) -> Tensors:
    """All tensors of a draft file by canonical name, d2t and t2d included unless they are the identity."""
    flat = {name: array for name, array in flatten(draft.params).items() if not name.startswith(_LENT)}
    tensors = {name: np.asarray(jax.device_get(array)) for name, array in flat.items()}
    if not np.array_equal(draft.d2t, np.arange(draft.config.decoder.vocab_size)):
        tensors["d2t"] = np.asarray(to_offsets(draft.d2t), np.int64)
        tensors["t2d"] = t2d(draft.d2t, draft.config.decoder.vocab_size)
    return tensors

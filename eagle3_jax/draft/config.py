"""Static facts of an EAGLE-3 draft, and their form in a speculators config.json."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.models.config import DecoderConfig, decoder_config, decoder_config_to_hf
from eagle3_jax.taps import CONVERT, TapSet, UnknownTaps, WiringError, require, resolve_taps

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors in a file, by canonical name

NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_KNOWN = frozenset(
    [
        "architectures",
        "auto_map",
        "bias",
        "draft_vocab_size",
        "dtype",
        "torch_dtype",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "embed_requires_grad",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "target_hidden_size",
        "tie_word_embeddings",
        "transformer_layer_config",
        "transformers_version",
        "eagle3_jax",
        "has_no_defaults_at_init",
        "num_aux_hidden_states",
    ]
) | frozenset(NORM_FLAGS)

# Switches of eagle_config, with the values that mean the network we have.
_EAGLE_SWITCHES = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}
_EAGLE_KEYS = frozenset(
    ("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "norm_before_fc", "parallel_draft_step")
    + ("parallel_draft_heads_num_layers", *_EAGLE_SWITCHES)
)

# speculators writes transformer_layer_config without what equals the class's default, so these belong in an absent key.
_DEFAULTS = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
}


@dataclass(frozen=True)
class DraftConfig:
    """One draft network.

    decoder: shape of the draft's own blocks; its vocab_size is the *target's*, since embeddings cover that one.
    taps: target features that fc reads, in order. draft_vocab_size: rows of lm_head.
    norm_before_residual: the residual is the normed hidden. norm_before_fc: one RMSNorm over all taps joined.
    fc_norm: one RMSNorm a tap. norm_output: the post-norm hidden is fed back (EAGLE-3.1) instead of the pre-norm one.
    use_aux_hidden_state: False = the draft reads only the last block's output, after the target's final norm; then
    has_fc may be False too.
    """

    decoder: DecoderConfig
    taps: TapSet
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    use_aux_hidden_state: bool = True
    has_fc: bool = True

    def __post_init__(self):
        if self.norm_before_fc and self.fc_norm:
            raise UserError("norm_before_fc and fc_norm are both on / a draft has one or the other")
        if not self.use_aux_hidden_state and len(self.taps) != 1:
            raise UserError(f"use_aux_hidden_state is false but the draft has {len(self.taps)} taps / it reads one")
        if not self.has_fc and self.target_hidden_size != self.decoder.hidden_size:
            raise UserError("the draft has no fc but another hidden size than its target / one of them is wrong")


def draft_config_from_speculators(
    raw: dict[str, Any],
    where: str,
    taps: TapSet | None = None,
    shapes: Shapes | None = None,
    convention: str | None = None,
    num_layers: int | None = None,
) -> DraftConfig:
    """Reads a speculators config.json (0.1 to 0.9).

    taps: ids the file lacks; contradicting the file is a WiringError. shapes: of the file's tensors, which say what an
    absent key means. convention, num_layers: see `taps.resolve_taps`.
    """
    kind = raw.get("speculators_model_type")
    if kind != "eagle3":
        kind = kind or (raw.get("architectures") or ["unknown"])[0]
        raise UserError(f"not an EAGLE-3 draft in speculators layout ({kind}) / {where} / use an EAGLE-3 draft")
    unknown = sorted(k for k in raw if k not in _KNOWN and raw[k] not in (None, False, {}, []))
    if unknown:
        raise UserError(f"{where} has keys that are not understood: {', '.join(unknown)} / remove them or convert anew")
    if raw.get("norm_before_residual") is None:
        raise UserError(
            f"{where} lacks norm_before_residual, which speculators takes for false and vLLM for true / "
            "add the one the draft was trained with"
        )
    if not isinstance(raw.get("transformer_layer_config"), dict):
        raise UserError(f"{where} lacks transformer_layer_config / it must say the shape of the draft's layers")
    shapes = shapes or {}
    layer = dict(raw["transformer_layer_config"])
    has_qk_norm = "layers.0.self_attn.q_norm.weight" in shapes
    layer.setdefault("model_type", "qwen3" if has_qk_norm else "llama")
    if layer["model_type"] not in list(_DEFAULTS):  # a list compares, whatever the file holds; a dict would hash it
        known = ", ".join(_DEFAULTS)
        raise UserError(f"{where} has a draft of model_type {layer['model_type']!r} / supported: {known}")
    layer = {**_DEFAULTS[layer["model_type"]], **layer}
    decoder = decoder_config(layer, f"{where} transformer_layer_config", strict=True)
    return draft_config(raw, decoder, where, taps, shapes, convention, num_layers)


def draft_config(
    raw: dict[str, Any],
    decoder: DecoderConfig,
    where: str,
    taps: TapSet | None,
    shapes: Shapes,
    convention: str | None,
    num_layers: int | None,
) -> DraftConfig:
    """What config.json says besides the decoder, the same keys in every format."""
    eagle = raw.get("eagle_config") or {}
    _check_eagle_config(raw, eagle, where)
    if decoder.rope_border is not None:
        raise UserError(
            f"{where} has rope type longrope: past {decoder.rope_border} tokens some systems change the factors of a "
            "whole text, some of later tokens / use a draft of another type (eagle3 train makes none of this one)"
        )
    use_aux = eagle.get("use_aux_hidden_state") is not False
    rows = next(iter(shapes.get("lm_head.weight", ())), decoder.vocab_size)
    norms = {flag: bool(raw.get(flag)) for flag in NORM_FLAGS}
    norms["norm_before_fc"] |= bool(eagle.get("norm_before_fc"))  # vLLM reads it there too
    config = DraftConfig(
        decoder=decoder,
        taps=_taps(raw, where, taps, convention, num_layers) if use_aux else _last_tap(raw, where, taps, num_layers),
        draft_vocab_size=raw.get("draft_vocab_size") or rows,
        target_hidden_size=raw.get("target_hidden_size") or decoder.hidden_size,
        fc_bias=bool(raw.get("bias")),
        use_aux_hidden_state=use_aux,
        has_fc=use_aux or "fc.weight" in shapes,
        **norms,
    )
    stated = raw.get("num_aux_hidden_states")
    if stated is not None and stated != len(config.taps):
        raise UserError(f"{where} has num_aux_hidden_states {stated} but {len(config.taps)} taps / correct one of them")
    return config


def _check_eagle_config(raw: dict[str, Any], eagle: dict[str, Any], where: str) -> None:
    unknown = sorted(key for key in eagle if key not in _EAGLE_KEYS and eagle[key] not in (None, False))
    if unknown:
        raise UserError(f"{where} has eagle_config keys that are not understood: {', '.join(unknown)}")
    for key, expected in _EAGLE_SWITCHES.items():
        if eagle.get(key) not in (None, expected):
            raise UserError(f"{where} has eagle_config.{key} {eagle[key]} / only {expected} is supported")
    if {raw.get("norm_before_fc"), eagle.get("norm_before_fc")} == {True, False}:
        raise UserError(f"{where} has norm_before_fc twice, in eagle_config with another value / correct one of them")


def _own_taps(raw: dict[str, Any], where: str) -> list[int] | None:
    block = raw.get("eagle3_jax") or {}
    if block.get("taps_convention", "block-input") != "block-input":
        raise WiringError(f"{where} numbers taps by {block['taps_convention']!r}; only block-input is written and read")
    ids = block.get("taps")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise WiringError(f"{where}: eagle3_jax.taps is {ids!r} / it must be a list of numbers")
    return ids


def _taps(raw: dict[str, Any], where: str, given, convention: str | None, num_layers: int | None) -> TapSet:
    top = raw.get("eagle_aux_hidden_state_layer_ids")
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return resolve_taps(where, top, nested or None, _own_taps(raw, where), given, convention, num_layers)


def _last_tap(raw: dict[str, Any], where: str, given: TapSet | None, num_layers: int | None) -> TapSet:
    """The one tap of a draft without auxiliary hidden states: N, the last block's output, whose number no file says."""
    own = _own_taps(raw, where)
    stated = [TapSet(source) for source in (own, given, num_layers and [num_layers]) if source]
    if not stated:
        raise UnknownTaps(
            f"{where} has use_aux_hidden_state false: the draft reads the target's last hidden state, tap N / "
            f"give N, the number of the target's blocks, with load_draft(taps=) or {CONVERT} --taps N"
        )
    for other in stated[1:]:
        require(other, stated[0])
    return stated[0]


def draft_config_to_speculators(
    config: DraftConfig, dtype: str, speculative_tokens: int, verifier: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    """The speculators config.json of a draft.

    speculative_tokens: chain length written for servers; verifier: {name_or_path, architectures}; own: facts for the
    `eagle3_jax` block (target fingerprint, training facts), to which taps and their convention are added. What
    speculators itself cannot say (a bias of fc, no auxiliary hidden states) goes to the keys SGLang uses.
    """
    decoder = dataclasses.replace(config.decoder, tie_embeddings=False)
    wide = config.target_hidden_size != decoder.hidden_size
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size if wide else None,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        **{flag: getattr(config, flag) for flag in NORM_FLAGS},
        **({"bias": True} if config.fc_bias else {}),
        **({} if config.use_aux_hidden_state else {"eagle_config": {"use_aux_hidden_state": False}}),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": decoder_config_to_hf(decoder),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": verifier,
        },
        "eagle3_jax": own_block(config, own),
    }


def own_block(config: DraftConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The `eagle3_jax` block of config.json, in every format: facts, and the taps with their convention named."""
    return {**facts, "taps": list(config.taps), "taps_convention": "block-input"}

"""Static facts of an EAGLE-3 draft, and their form in a speculators config.json."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.models.config import DecoderConfig, decoder_config, decoder_config_to_hf
from eagle3_jax.taps import TapSet, WiringError, require

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_KNOWN = frozenset(
    [
        "architectures",
        "auto_map",
        "draft_vocab_size",
        "dtype",
        "torch_dtype",
        "eagle_aux_hidden_state_layer_ids",
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
    ]
) | frozenset(_FLAGS)


@dataclass(frozen=True)
class DraftConfig:
    """One draft network.

    decoder: shape of the draft's own blocks; its vocab_size is the *target's*, since embeddings cover that one.
    taps: target features that fc reads, in order. draft_vocab_size: rows of lm_head.
    norm_before_residual: the residual is the normed hidden. norm_before_fc: one RMSNorm over all taps joined.
    fc_norm: one RMSNorm a tap. norm_output: the post-norm hidden is fed back (EAGLE-3.1) instead of the pre-norm one.
    """

    decoder: DecoderConfig
    taps: TapSet
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self):
        if self.norm_before_fc and self.fc_norm:
            raise UserError("norm_before_fc and fc_norm are both on / a draft has one or the other")


def draft_config_from_speculators(raw: dict[str, Any], where: str, taps: TapSet | None = None) -> DraftConfig:
    """Reads a speculators config.json. `taps` supplies ids the file lacks; contradicting the file is a WiringError."""
    if raw.get("speculators_model_type") != "eagle3" or "transformer_layer_config" not in raw:
        kind = raw.get("speculators_model_type") or (raw.get("architectures") or ["unknown"])[0]
        raise UserError(f"not an EAGLE-3 draft in speculators layout ({kind}) / {where} / convert it first")
    unknown = sorted(k for k in raw if k not in _KNOWN and raw[k] not in (None, False, {}, []))
    if unknown:
        raise UserError(f"{where} has keys that are not understood: {', '.join(unknown)} / remove them or convert anew")
    decoder = decoder_config(raw["transformer_layer_config"], f"{where} transformer_layer_config")
    return DraftConfig(
        decoder=decoder,
        taps=_taps(raw, where, taps),
        draft_vocab_size=raw.get("draft_vocab_size") or decoder.vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or decoder.hidden_size,
        **{flag: bool(raw.get(flag, False)) for flag in _FLAGS},
    )


def _taps(raw: dict[str, Any], where: str, given: TapSet | None) -> TapSet:
    block = raw.get("eagle3_jax") or {}
    if block.get("taps_convention", "block-input") != "block-input":
        raise WiringError(f"{where} numbers taps by {block['taps_convention']!r}; only block-input is written and read")
    own = block.get("taps")
    stated = raw.get("eagle_aux_hidden_state_layer_ids")
    stated = own if stated is None else stated
    if stated is None:
        if given is None:
            raise WiringError(
                f"{where} does not say which target layers the draft reads (eagle_aux_hidden_state_layer_ids) / "
                "name them with --taps: the speculators default is 2, N//2, N-3 of the target's N blocks"
            )
        return given
    if not isinstance(stated, list):
        raise WiringError(f"{where}: eagle_aux_hidden_state_layer_ids is {stated!r} / it must be a list of numbers")
    in_file = TapSet(stated)
    if own is not None:
        require(TapSet(own), in_file)
    if given is not None:
        require(given, in_file)
    return in_file


def draft_config_to_speculators(
    config: DraftConfig, dtype: str, speculative_tokens: int, verifier: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    """The speculators config.json of a draft.

    speculative_tokens: chain length written for servers; verifier: {name_or_path, architectures}; own: facts for the
    `eagle3_jax` block (target fingerprint, training facts), to which taps and their convention are added.
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
        **{flag: getattr(config, flag) for flag in _FLAGS},
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
        "eagle3_jax": {**own, "taps": list(config.taps), "taps_convention": "block-input"},
    }

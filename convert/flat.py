"""What SGLang/SpecForge, SafeAILab and ModelOpt have in common: one flat config.json, a Llama's keys and a draft's."""

from typing import Any

from eagle3_jax.draft.config import NORM_FLAGS, draft_config, own_block
from eagle3_jax.draft.draft import Checkpoint, Draft, own_facts
from eagle3_jax.draft.folder import Tensors, canonical_names, stored_layers
from eagle3_jax.errors import UserError
from eagle3_jax.models.config import decoder_config, decoder_config_to_hf
from eagle3_jax.taps import TapSet

# Keys of the draft; every other key is one of the decoder's and must be understood as such.
_DRAFT_KEYS = frozenset(
    ("draft_vocab_size", "target_hidden_size", "bias", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    + ("num_aux_hidden_states", "use_aux_norm", "eagle3_jax", "logit_scale", "target_model_type")
    + NORM_FLAGS
)


def read(
    raw: dict[str, Any],
    stored: Tensors,
    where: str,
    taps: TapSet | None,
    convention: str | None,
    num_layers: int | None,
    counts_layers: bool = True,
) -> Checkpoint:
    """A flat draft in canonical form. counts_layers: whether num_hidden_layers means the draft's (SafeAILab: no)."""
    file = f"{where}/config.json"
    tensors = canonical_names(stored, where)
    shapes = {name: tuple(array.shape) for name, array in tensors.items()}
    _refuse_ambiguous_norm_output(raw, file)
    if raw.get("logit_scale", 1.0) not in (None, 1.0):
        raise UserError(f"{file} has logit_scale {raw['logit_scale']} / only 1.0 is supported")
    decoder_keys = {key: value for key, value in raw.items() if key not in _DRAFT_KEYS}
    if not counts_layers:
        decoder_keys["num_hidden_layers"] = max(len(stored_layers(tensors)), 1)
    # Only tensors tell: whatever model_type says, none of these systems builds q/k norms unless they are in the file.
    has_qk_norm = "layers.0.self_attn.q_norm.weight" in tensors
    decoder_keys["model_type"] = "qwen3" if has_qk_norm else "llama"
    decoder = decoder_config(decoder_keys, file, strict=True)
    flags = {**raw, "fc_norm": raw.get("fc_norm") or raw.get("use_aux_norm")}  # SGLang's older name
    config = draft_config(flags, decoder, file, taps, shapes, convention, num_layers)
    if raw.get("tie_word_embeddings") and "lm_head.weight" not in tensors:
        if "embed_tokens.weight" not in tensors:
            raise UserError(f"tie_word_embeddings is on but neither lm_head nor embed_tokens is stored / {where}")
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    own = raw.get("eagle3_jax") or {}
    facts = {key: value for key, value in own.items() if key not in _OWN_KEYS and value is not None}
    return Checkpoint(config, tensors, {"verifier": _no_verifier(), **facts})


_OWN_KEYS = ("taps", "taps_convention")


def _no_verifier() -> dict[str, Any]:
    """These formats name no verifier."""
    return {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}


def _refuse_ambiguous_norm_output(raw: dict[str, Any], where: str) -> None:
    """An explicit false has two meanings; true has one to all servers, and our own block says who wrote it."""
    if raw.get("norm_output") is False and "eagle3_jax" not in raw:
        raise UserError(
            f"{where} has norm_output false: SGLang and vLLM then feed back the un-normed hidden, SpecForge leaves out "
            "the final norm before lm_head, which is not supported / remove the key if the draft was trained with that "
            "norm"
        )


def write(draft: Draft, architecture: str, eagle_config: dict[str, Any] | None) -> dict[str, Any]:
    """The flat config.json of a draft, rope in the transformers-4 layout that all these systems read."""
    config = draft.config
    decoder = decoder_config_to_hf(config.decoder)
    rope = decoder.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    optional: dict[str, Any] = {}
    if config.target_hidden_size != config.decoder.hidden_size:
        # Never null: SGLang and its JAX sibling multiply it whenever the key exists.
        optional["target_hidden_size"] = config.target_hidden_size
    if eagle_config is not None:
        optional["eagle_config"] = eagle_config
        if config.use_aux_hidden_state:  # as block inputs, where vLLM looks for them
            optional["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    return {
        "architectures": [architecture],
        **decoder,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": rope if kind != "default" or len(rope) > 1 else None,
        "torch_dtype": str(draft.dtype),
        "draft_vocab_size": config.draft_vocab_size,
        **optional,
        "eagle3_jax": own_block(config, {**own_facts(draft), **_named_facts(draft)}),
    }


def _named_facts(draft: Draft) -> dict[str, Any]:
    """Facts for which speculators has keys of its own and a flat config has none."""
    return {key: draft.facts[key] for key in ("verifier", "speculative_tokens") if draft.facts.get(key)}


def unsupported(draft: Draft, flags: tuple[str, ...]) -> list[str]:
    """Those of `flags` that the draft needs, by the name of the key or tensor that says so."""
    config, decoder = draft.config, draft.config.decoder
    needs = {
        **{flag: getattr(config, flag) for flag in NORM_FLAGS},
        "bias": config.fc_bias,
        "use_aux_hidden_state": not config.use_aux_hidden_state,
        "attention_bias": decoder.attention_bias,
        "mlp_bias": decoder.mlp_bias,
        "qk_norm": decoder.qk_norm,
        "sliding_window": bool(decoder.windows),
        "num_hidden_layers": decoder.num_layers > 1,
    }
    words = {
        "use_aux_hidden_state": "use_aux_hidden_state false",
        "qk_norm": "q_norm/k_norm (a Qwen3 draft)",
        "num_hidden_layers": f"num_hidden_layers {decoder.num_layers}",
        "bias": "bias (of fc)",
    }
    return [words.get(flag, flag) for flag in flags if needs[flag]]

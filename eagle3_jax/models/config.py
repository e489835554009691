"""Static facts of a decoder, read from a Hugging Face config.json. Hashable: part of the jit cache key."""

import dataclasses
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.models.rope import RopeConfig, rope_from_hf

# Keys that change no number we compute: training facts, file facts, generation defaults.
_HARMLESS = frozenset(
    ("architectures", "model_type", "is_llama_config", "auto_map", "hub_id", "dtype", "torch_dtype")
    + ("transformers_version", "quantization_config", "attn_implementation", "use_cache", "cache_implementation")
    + ("chunk_size", "max_window_layers", "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop")
    + ("embd_pdrop", "output_router_logits", "router_aux_loss_coef", "bos_token_id", "eos_token_id", "pad_token_id")
    + ("id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states", "return_dict")
    + ("use_return_dict", "length_penalty", "max_length", "num_beams", "num_beam_groups", "num_return_sequences")
    + ("repetition_penalty", "temperature", "top_k", "top_p", "typical_p", "do_sample")
)
_READ = frozenset(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    + ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings")
    + ("tie_word_embeddings", "attention_bias", "mlp_bias", "pretraining_tp", "rope_parameters", "rope_scaling")
    + ("rope_theta", "partial_rotary_factor", "rope_interleaved", "original_max_position_embeddings")
    + ("sliding_window", "use_sliding_window", "layer_types")
)
# Keys with which other models compute something else; a family that does not read one refuses it. 1 is no factor.
_OTHERS = frozenset(
    ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv", "use_qk_norm")
    + ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale")
    + ("scale_emb", "scale_depth", "dim_model_base", "num_experts", "num_local_experts", "n_routed_experts")
    + ("kv_lora_rank", "no_rope_layers", "attention_chunk_size", "alibi", "parallel_attn", "use_parallel_residual")
    + ("rotary_pct", "rotary_dim")
)
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = ("silu", "swish", "relu", "relu2", "quick_gelu", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of a block's MLP.

    count, per_token: experts of a layer, and how many of them a token goes through. hidden_size: of one expert.
    normalise: the chosen ones' weights add up to one. dense_layers: blocks that keep an ordinary MLP.
    shared: experts that every token goes through besides. groups, groups_kept: a token chooses within the best
    groups_kept of `groups` equal groups. scaling: factor of the routed experts' sum. alpha, limit: of a clamped SwiGLU.
    """

    count: int
    per_token: int
    hidden_size: int
    normalise: bool = True
    dense_layers: tuple[int, ...] = ()
    shared: int = 0
    groups: int = 1
    groups_kept: int = 1
    scaling: float = 1.0
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self):
        reach = self.count // self.groups * self.groups_kept
        if self.groups_kept > self.groups or self.per_token > reach:
            raise UserError(
                f"config.json sends a token through {self.per_token} of {self.count} experts in {self.groups_kept} of "
                f"{self.groups} groups / num_experts_per_tok and topk_group cannot be more than there are"
            )


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek): keys and values of all heads are read from one short vector a token.

    q_rank: None = queries are projected directly. nope_dim, rope_dim: parts of a head without and with rotation;
    interleaved: the rotated pairs lie side by side (2i, 2i+1).
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a decoder. Sizes are counts; head_dim is per head. The defaults are Llama's.

    attention_bias: q, k, v and o have one; qkv_bias: q, k and v only.
    windows: how many positions each layer looks back, itself included, None for all; () = no layer has a window.
    layer_ropes: the rotation of each layer, None for none; () = `rope` in every layer.
    query_scale: factor of the scores, None = head_dim**-0.5. attention_softcap, logit_softcap: c tanh(x / c) of scores
    and logits. norm_offset: added to the weights of all norms (Gemma: 1). value_dim: size of a head's values,
    None = head_dim.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    activation: str = "silu"
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    value_dim: int | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    def window(self, layer: int) -> int | None:
        """Positions that a layer looks back, itself included; None = all."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """The rotation of a layer; None = none."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    @property
    def rope_border(self) -> int | None:
        """LongRoPE: texts that may grow longer than this have other rotations, of all their tokens; None = none."""
        ropes = [rope for rope in (self.layer_ropes or (self.rope,)) if rope is not None]
        borders = [r.get("original_max_position_embeddings") for r in ropes if r.kind == "longrope"]
        return min((border for border in borders if border < self.max_positions), default=None)

    @property
    def facts(self) -> dict[str, int]:
        """What must agree for two targets to be interchangeable in shape."""
        names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
        return {name: getattr(self, name) for name in names}


def decoder_config(config: dict[str, Any], where: str = "config.json", strict: bool = False) -> DecoderConfig:
    """Reads the config.json dictionary of a draft or of a Llama-type decoder.

    Raises UserError when a size is missing or an option is not supported; warns about keys it does not know, or with
    `strict` refuses them.
    """
    if isinstance(config.get("quantization_config"), dict) and config["quantization_config"]:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"{where} describes weights quantised with {method!r} / use an unquantised copy")
    base = common_config(config, where, strict=strict, activations=("silu",))
    qk_norm = config.get("model_type") == "qwen3"
    return dataclasses.replace(base, qk_norm=qk_norm, windows=_windows(config, where))


def common_config(
    config: dict[str, Any],
    where: str,
    also: Iterable[str] = (),
    *,
    strict: bool = False,
    activations: tuple[str, ...] = ACTIVATIONS,
    **rope: Any,
) -> DecoderConfig:
    """What the config.json of every family says in the same way; windows and the rest are the family's to read.

    also: further keys that the family reads. activations: those it may have. rope: options of `rope_from_hf`.
    Raises UserError as `decoder_config` does.
    """
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in sizes if not isinstance(config.get(key), int)]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)} / it must be the config of a decoder")
    check_types(config, where)
    _refuse_unsupported(config, where)
    _report_unknown(config, where, strict, frozenset(also))
    key = "hidden_activation" if "hidden_activation" in also else "hidden_act"
    activation = config.get(key, "silu")
    if activation not in activations:
        raise UserError(f"{where} has {key} {activation!r} / supported: {', '.join(activations)}")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(f"{where}: {heads} attention heads do not divide into {kv_heads} key-value heads")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_from_hf(config, head_dim, **rope),
        max_positions=int(config.get("max_position_embeddings") or 2048),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        activation=activation,
    )


def decoder_config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `decoder_config`: a transformers-5 style dictionary."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": config.rope.to_hf(),
        **_windows_to_hf(config),
    }


def counts(config: dict[str, Any], where: str, *keys: str, least: int = 1) -> None:
    """UserError unless all of these keys hold integers, no lower than `least`."""
    wrong = [f"{key} {config.get(key)!r}" for key in keys if type(config.get(key)) is not int or config[key] < least]
    if wrong:
        raise UserError(f"{where} has {', '.join(wrong)} / they must be integers from {least} on")


def positive_numbers(config: dict[str, Any], where: str, *keys: str, or_null: bool = False) -> None:
    """UserError unless each of these keys holds a positive number, or null where that may be."""
    values = {key: config.get(key) for key in keys if not (or_null and config.get(key) is None)}
    wrong = [f"{key} {value!r}" for key, value in values.items() if type(value) not in (int, float) or value <= 0]
    if wrong:
        raise UserError(f"{where} has {', '.join(wrong)} / they must be positive numbers")


def _windows(config: dict[str, Any], where: str) -> tuple[int | None, ...]:
    """The windows of a draft's layers, as transformers reads sliding_window, use_sliding_window and layer_types."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or []
    if not kinds and window and config.get("model_type") == "qwen3":
        kinds = kinds_from_layer(config, where)
    if window and not kinds:
        raise UserError(
            f"{where} has sliding_window {window} but no layer_types, so some servers use it and some do not / "
            'add "layer_types", one of full_attention and sliding_attention a layer'
        )
    return windows_of(config, where, kinds, window)


def kinds_from_layer(config: dict[str, Any], where: str) -> list[str]:
    """Layer types of Qwen: full attention up to layer max_window_layers, a window from there on."""
    config = {"max_window_layers": 28} | config
    counts(config, where, "max_window_layers", least=0)
    first = config["max_window_layers"]
    return [SLIDING if layer >= first else FULL for layer in range(config["num_hidden_layers"])]


def kinds_by_period(config: dict[str, Any], period: int) -> list[str]:
    """Layer types of Gemma and gpt-oss: every `period`-th layer has full attention, the others a window."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(config["num_hidden_layers"])]


def one_window(config: dict[str, Any], where: str, window: Any) -> tuple[int | None, ...]:
    """DecoderConfig.windows of families in which all layers have the same window or none (None).

    Raises UserError for layer_types that say otherwise: transformers ignores them here, some servers do not.
    """
    kinds = [FULL if window is None else SLIDING] * config["num_hidden_layers"]
    if config.get("layer_types") not in (None, [], kinds):
        raise UserError(
            f"{where} has sliding_window {window} and layer_types that differ from it, which transformers ignores in "
            f"this family / remove layer_types, or make all of them {kinds[0]}"
        )
    return windows_of(config, where, kinds, window)


def no_windows(config: dict[str, Any], where: str) -> None:
    """UserError for sliding windows or other types of layers, in families whose layers all have full attention."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    others = sorted(set(map(str, config.get("layer_types") or [])) - {FULL})
    if window or others:
        said = f"layer_types {others}" if others else f"sliding_window {window}"
        raise UserError(f"{where} has {said} / models of this family have full attention only")


def windows_of(config: dict[str, Any], where: str, kinds: list[str], window: Any) -> tuple[int | None, ...]:
    """DecoderConfig.windows from layer types ([] = all full) and the window of the sliding ones."""
    unknown = sorted(set(map(str, kinds)) - {FULL, SLIDING})
    if unknown:
        raise UserError(f"{where} has layer_types {unknown} / full_attention and sliding_attention are supported")
    if kinds and len(kinds) != config["num_hidden_layers"]:
        raise UserError(f"{where} has {len(kinds)} layer_types for {config['num_hidden_layers']} layers")
    if SLIDING not in kinds:
        return ()
    if type(window) is not int or window < 1:
        off = ", which is switched off" if window is None and config.get("sliding_window") is not None else ""
        raise UserError(
            f"{where} has sliding_attention layers but sliding_window {config.get('sliding_window')!r}{off} / "
            "correct layer_types, sliding_window or use_sliding_window"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def ropes_by_kind(
    config: dict[str, Any], where: str, full: RopeConfig, windows: tuple[int | None, ...], theta: float
) -> tuple[RopeConfig, ...]:
    """DecoderConfig.layer_ropes of Gemma 3 and OLMo 3: layers with a window have a rotation of their own, which the
    older rope_scaling does not concern. full: of the other layers. theta: base of the sliding ones if no key has it.
    """
    given = config.get("rope_parameters") or {}
    if given and not any(isinstance(value, dict) for value in given.values()):
        raise UserError(f"{where} has one rotation in rope_parameters / give one for each of {FULL} and {SLIDING}")
    own = {"rope_parameters": given.get(SLIDING) or {}, "max_position_embeddings": full.max_positions}
    sliding = rope_from_hf(own, full.head_dim, default_theta=theta)
    return tuple(sliding if window else full for window in windows)


def _windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    if not config.windows:
        return {}
    return {
        "sliding_window": next(window for window in config.windows if window),
        "use_sliding_window": True,
        "layer_types": [SLIDING if window else FULL for window in config.windows],
    }


def check_types(config: dict[str, Any], where: str) -> None:
    """UserError for a key that holds another type of JSON than it can mean anything in."""
    counts = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    wrong = [key for key in counts if type(config[key]) is not int or config[key] < 1]
    given = {key: config[key] for key in optional if config.get(key) is not None}
    wrong += [key for key, value in given.items() if type(value) is not int or value < 1]
    switches = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
    switches += ("norm_topk_prob", "rope_interleave")
    wrong += [key for key in switches if not isinstance(config.get(key), bool | None)]
    wrong += ["layer_types"] if not isinstance(config.get("layer_types"), list | None) else []
    wrong += ["quantization_config"] if not isinstance(config.get("quantization_config"), dict | None) else []
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        wrong.append("rms_norm_eps")
    if wrong:
        values = ", ".join(f"{key} {config.get(key)!r}" for key in wrong)
        raise UserError(f"{where} has values that mean nothing: {values} / correct them")


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    if config.get("rope_interleaved"):
        raise UserError(f"{where} has rope_interleaved / only the half-split rotation (NeoX) is supported")
    if config["hidden_size"] % config["num_attention_heads"] and not config.get("head_dim"):
        raise UserError(f"{where}: hidden_size is no multiple of num_attention_heads and head_dim is absent")


def _report_unknown(config: dict[str, Any], where: str, strict: bool, also: frozenset[str]) -> None:
    unknown = sorted(
        key
        for key, value in config.items()
        if key not in _READ | _HARMLESS | also and not key.startswith("_") and value not in (None, False, "", [], {})
    )
    if unknown and strict:
        raise UserError(f"{where} has keys that are not understood: {', '.join(unknown)} / remove them if harmless")
    if changing := [key for key in unknown if key in _OTHERS and (config[key] is True or config[key] != 1)]:
        said = ", ".join(f"{key} {config[key]!r}" for key in changing)
        raise UserError(f"{where} has {said}, which models of this family do not compute / remove it if it is unused")
    if unknown:
        warnings.warn(f"{where}: keys not understood and ignored: {', '.join(unknown)}", stacklevel=5)

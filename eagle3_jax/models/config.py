"""Static facts of a decoder, read from a Hugging Face config.json. Hashable: part of the jit cache key."""

import warnings
from dataclasses import dataclass
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.models.rope import RopeConfig, rope_from_hf

# Keys that change no number we compute: training facts, file facts, generation defaults.
_HARMLESS = frozenset(
    [
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "auto_map",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_implementation",
        "is_llama_config",
        "hub_id",
        "max_window_layers",
        "cache_implementation",
        "id2label",
        "label2id",
        "problem_type",
    ]
)
_READ = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "pretraining_tp",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "rope_interleaved",
    ]
)


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a pre-norm SwiGLU decoder (Llama family). Sizes are counts; head_dim is per head.

    windows: how many positions each layer looks back, itself included, None for all; () = no layer has a window.
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

    def window(self, layer: int) -> int | None:
        """Positions that a layer looks back, itself included; None = all."""
        return self.windows[layer] if self.windows else None

    @property
    def facts(self) -> dict[str, int]:
        """What must agree for two targets to be interchangeable in shape."""
        names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
        return {name: getattr(self, name) for name in names}


def decoder_config(config: dict[str, Any], where: str = "config.json", strict: bool = False) -> DecoderConfig:
    """Reads a Llama-type config.json dictionary.

    Raises UserError when a size is missing or an option is not supported; warns about keys it does not know, or with
    `strict` refuses them.
    """
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in sizes if not isinstance(config.get(key), int)]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)} / it must be the config of a Llama-type decoder")
    _check_types(config, where)
    _refuse_unsupported(config, where)
    _report_unknown(config, where, strict)
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
        rope=rope_from_hf(config, head_dim),
        max_positions=int(config.get("max_position_embeddings") or 2048),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=config.get("model_type") == "qwen3",
        windows=_windows(config, where),
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


def _windows(config: dict[str, Any], where: str) -> tuple[int | None, ...]:
    """The window of each layer, as transformers reads sliding_window, use_sliding_window and layer_types."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or []
    if not kinds and window and config.get("model_type") == "qwen3":  # from this layer on, Qwen has a window
        full = config.get("max_window_layers", 28)
        kinds = ["full_attention"] * full + ["sliding_attention"] * max(config["num_hidden_layers"] - full, 0)
        kinds = kinds[: config["num_hidden_layers"]]
    if window and not kinds:
        raise UserError(
            f"{where} has sliding_window {window} but no layer_types, so some servers use it and some do not / "
            'add "layer_types", one of full_attention and sliding_attention a layer'
        )
    unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(f"{where} has layer_types {unknown} / full_attention and sliding_attention are supported")
    if kinds and len(kinds) != config["num_hidden_layers"]:
        raise UserError(f"{where} has {len(kinds)} layer_types for {config['num_hidden_layers']} layers")
    if "sliding_attention" not in kinds:
        return ()
    if not isinstance(window, int) or window < 1:
        raise UserError(f"{where} has sliding_attention layers but sliding_window {config.get('sliding_window')!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    if not config.windows:
        return {}
    return {
        "sliding_window": next(window for window in config.windows if window),
        "use_sliding_window": True,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
    }


def _check_types(config: dict[str, Any], where: str) -> None:
    """UserError for a key that holds another type of JSON than it can mean anything in."""
    counts = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    wrong = [key for key in counts if type(config[key]) is not int or config[key] < 1]
    given = {key: config[key] for key in optional if config.get(key) is not None}
    wrong += [key for key, value in given.items() if type(value) is not int or value < 1]
    switches = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
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
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where} has hidden_act {config['hidden_act']!r} / only silu is supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"{where} describes weights quantised with {method!r} / use an unquantised copy")
    if config.get("rope_interleaved"):
        raise UserError(f"{where} has rope_interleaved / only the half-split rotation (NeoX) is supported")
    if config["hidden_size"] % config["num_attention_heads"] and not config.get("head_dim"):
        raise UserError(f"{where}: hidden_size is no multiple of num_attention_heads and head_dim is absent")


def _report_unknown(config: dict[str, Any], where: str, strict: bool) -> None:
    unknown = sorted(
        key
        for key, value in config.items()
        if key not in _READ | _HARMLESS and not key.startswith("_") and value not in (None, False, "", [], {})
    )
    if unknown and strict:
        raise UserError(f"{where} has keys that are not understood: {', '.join(unknown)} / remove them if harmless")
    if unknown:
        warnings.warn(f"{where}: keys not understood and ignored: {', '.join(unknown)}", stacklevel=4)

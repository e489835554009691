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
        "rope_interleaved",
        "hub_id",
        "max_window_layers",
        "layer_types",
        "use_sliding_window",
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
    ]
)


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a pre-norm SwiGLU decoder (Llama family). Sizes are counts; head_dim is per head."""

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

    @property
    def facts(self) -> dict[str, int]:
        """What must agree for two targets to be interchangeable in shape."""
        names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
        return {name: getattr(self, name) for name in names}


def decoder_config(config: dict[str, Any], where: str = "config.json") -> DecoderConfig:
    """Reads a Llama-type config.json dictionary.

    Raises UserError when a size is missing or an option is not supported; warns about keys it does not know.
    """
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in sizes if not isinstance(config.get(key), int)]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)} / it must be the config of a Llama-type decoder")
    _refuse_unsupported(config, where)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_from_hf(config, head_dim),
        max_positions=int(config.get("max_position_embeddings") or 2048),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=config.get("model_type") == "qwen3",
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
    }


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where} has hidden_act {config['hidden_act']!r} / only silu is supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UserError(f"{where} describes weights quantised with {method!r} / use an unquantised copy")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise UserError(f"{where} has sliding_window {config['sliding_window']} / full attention only is supported")
    if config["hidden_size"] % config["num_attention_heads"] and not config.get("head_dim"):
        raise UserError(f"{where}: hidden_size is no multiple of num_attention_heads and head_dim is absent")
    unknown = sorted(
        key
        for key, value in config.items()
        if key not in _READ | _HARMLESS and not key.startswith("_") and value not in (None, False, "", [], {})
    )
    if unknown:
        warnings.warn(f"{where}: keys not understood and ignored: {', '.join(unknown)}", stacklevel=3)

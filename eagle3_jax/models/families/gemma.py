"""Gemma 2 and 3 (text): a norm before and after each half of a block, norm weights stored minus one, embeddings times
sqrt(hidden), another score scale, sliding and global layers by turns; softcaps (2), head norms and two rotations (3).
"""

import dataclasses
from typing import Any

from flax import nnx

from eagle3_jax.errors import UserError
from eagle3_jax.models.blocks import MLP, Attention, block_norm
from eagle3_jax.models.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    common_config,
    kinds_by_period,
    positive_numbers,
    windows_of,
)
from eagle3_jax.models.family import Family
from eagle3_jax.models.rope import rope_from_hf

KEYS = (
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("use_bidirectional_attention", "sliding_window_pattern", "rope_local_base_freq"),
)
COMMON = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


class SandwichBlock(nnx.Module):
    """x + norm(Attention(norm(x))), then x + norm(MLP(norm(x)))."""

    def __init__(self, config: DecoderConfig):
        self.input_layernorm = block_norm(config)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = block_norm(config)
        self.pre_feedforward_layernorm = block_norm(config)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = block_norm(config)

    def __call__(self, x, angles, attend, cache):
        attended, cache = self.self_attn(self.input_layernorm(x), angles, attend, cache)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), cache


def read_gemma2(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = COMMON | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | raw
    return _read(raw, where, period=2)


def read_gemma3(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = COMMON | raw
    period = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    # Gemma 3 rotates its sliding layers by a base of their own; rope_scaling is meant for the global ones.
    config = _read(raw, where, period, layer_type=FULL, default_theta=1e6)
    own = (raw.get("rope_parameters") or {}).get(SLIDING) or {}
    local_raw = {"rope_parameters": own, "max_position_embeddings": config.max_positions}
    local = rope_from_hf(local_raw, config.head_dim, default_theta=raw.get("rope_local_base_freq") or 1e4)
    ropes = tuple(local if window else config.rope for window in config.windows)
    return dataclasses.replace(config, qk_norm=True, layer_ropes=ropes)


def _read(raw: dict[str, Any], where: str, period: int, **rope: Any) -> DecoderConfig:
    if raw.get("use_bidirectional_attention"):
        raise UserError(f"{where} has use_bidirectional_attention / that is an embedding model, no causal one")
    base = common_config(raw, where, KEYS, **rope)
    positive_numbers(raw, where, "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
    kinds = raw.get("layer_types") or kinds_by_period(raw, period)
    return dataclasses.replace(
        base,
        mlp_bias=False,
        windows=windows_of(raw, where, kinds, raw["sliding_window"]),
        query_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        attention_softcap=raw.get("attn_logit_softcapping"),
        logit_softcap=raw.get("final_logit_softcapping"),
        embedding_scale=base.hidden_size**0.5,
        norm_offset=1.0,
    )


def block(config: DecoderConfig, layer: int) -> SandwichBlock:
    return SandwichBlock(config)


GEMMA2 = Family("Gemma2ForCausalLM", read_gemma2, block)
GEMMA3 = Family("Gemma3ForCausalLM", read_gemma3, block)

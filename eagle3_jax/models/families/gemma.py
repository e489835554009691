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
    DecoderConfig,
    common_config,
    counts,
    kinds_by_period,
    positive_numbers,
    ropes_by_kind,
    windows_of,
)
from eagle3_jax.models.family import Family

KEYS = ("hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "use_bidirectional_attention")
GEMMA2_KEYS = (*KEYS, "attn_logit_softcapping")
GEMMA3_KEYS = (*KEYS, "sliding_window_pattern", "rope_local_base_freq")  # transformers applies no softcap to its scores
COMMON = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS = COMMON | {"max_position_embeddings": 8192}
GEMMA2_DEFAULTS |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3_DEFAULTS = COMMON | {"max_position_embeddings": 131072, "sliding_window_pattern": 6}
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4  # of Gemma 3


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
    raw = GEMMA2_DEFAULTS | raw
    positive_numbers(raw, where, "attn_logit_softcapping", or_null=True)
    config = _read(raw, where, GEMMA2_KEYS, period=2)
    return dataclasses.replace(config, attention_softcap=raw["attn_logit_softcapping"])


def read_gemma3(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = GEMMA3_DEFAULTS | raw
    counts(raw, where, "sliding_window_pattern")
    config = _read(raw, where, GEMMA3_KEYS, raw["sliding_window_pattern"], layer_type=FULL, default_theta=GLOBAL_THETA)
    theta = raw.get("rope_local_base_freq") or LOCAL_THETA
    ropes = ropes_by_kind(raw, where, config.rope, config.windows, theta)
    return dataclasses.replace(config, qk_norm=True, layer_ropes=ropes)


def _read(raw: dict[str, Any], where: str, keys: tuple[str, ...], period: int, **rope: Any) -> DecoderConfig:
    if raw.get("use_bidirectional_attention"):
        raise UserError(f"{where} has use_bidirectional_attention / that is an embedding model, no causal one")
    base = common_config(raw, where, keys, **rope)
    positive_numbers(raw, where, "query_pre_attn_scalar")
    positive_numbers(raw, where, "final_logit_softcapping", or_null=True)
    kinds = raw.get("layer_types") or kinds_by_period(raw, period)
    return dataclasses.replace(
        base,
        mlp_bias=False,
        windows=windows_of(raw, where, kinds, raw["sliding_window"]),
        query_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        logit_softcap=raw.get("final_logit_softcapping"),
        embedding_scale=base.hidden_size**0.5,
        norm_offset=1.0,
    )


def block(config: DecoderConfig, layer: int) -> SandwichBlock:
    return SandwichBlock(config)


GEMMA2 = Family("Gemma2ForCausalLM", read_gemma2, block)
GEMMA3 = Family("Gemma3ForCausalLM", read_gemma3, block)

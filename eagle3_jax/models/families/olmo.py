"""OLMo 2: norms after attention and MLP in place of those before, and norms over the whole query and key vectors.

OLMo 3 has windows besides, in three of four layers, and there a rotation that is not scaled.
"""

import dataclasses
from typing import Any

from flax import nnx

from eagle3_jax.errors import UserError
from eagle3_jax.models.blocks import MLP, Attention, RMSNorm, block_norm
from eagle3_jax.models.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    common_config,
    kinds_by_period,
    no_windows,
    ropes_by_kind,
    windows_of,
)
from eagle3_jax.models.family import Family

DEFAULTS = {"rms_norm_eps": 1e-5}
OLMO3_DEFAULTS = DEFAULTS | {"sliding_window": 4096}
OLMO3_THETA = 500000.0


class WholeNormAttention(Attention):
    """Queries and keys are normed before they are cut into heads."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config, config.hidden_size)
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.rms_norm_eps)

    def heads(self, x):
        whole = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        return tuple(part.reshape(*x.shape[:2], -1, self.head_dim) for part in whole)


class PostNormBlock(nnx.Module):
    """x + norm(Attention(x)), then x + norm(MLP(x))."""

    def __init__(self, config: DecoderConfig):
        self.self_attn = WholeNormAttention(config)
        self.post_attention_layernorm = block_norm(config)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = block_norm(config)

    def __call__(self, x, angles, attend, cache):
        attended, cache = self.self_attn(x, angles, attend, cache)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(x)), cache


def read_olmo2(raw: dict[str, Any], where: str) -> DecoderConfig:
    base = common_config(DEFAULTS | raw, where)
    no_windows(raw, where)
    return dataclasses.replace(base, qk_norm=True, mlp_bias=False)


def read_olmo3(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = OLMO3_DEFAULTS | raw
    base = common_config(raw, where, layer_type=FULL, default_theta=OLMO3_THETA)
    windows = windows_of(raw, where, raw.get("layer_types") or kinds_by_period(raw, 4), raw["sliding_window"])
    theta, own = raw.get("rope_theta"), (raw.get("rope_parameters") or {}).get(SLIDING) or {}
    if windows and theta not in (None, OLMO3_THETA) and "rope_theta" not in own:
        raise UserError(
            f"{where} has rope_theta {theta}, which transformers 4 takes for all layers and transformers 5 for those "
            f"without a window only / give one in rope_parameters for each of {FULL} and {SLIDING}"
        )
    ropes = ropes_by_kind(raw, where, base.rope, windows, OLMO3_THETA)
    return dataclasses.replace(base, qk_norm=True, mlp_bias=False, windows=windows, layer_ropes=ropes)


def block(config: DecoderConfig, layer: int) -> PostNormBlock:
    return PostNormBlock(config)


OLMO2 = Family("Olmo2ForCausalLM", read_olmo2, block)
OLMO3 = Family("Olmo3ForCausalLM", read_olmo3, block)

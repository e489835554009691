"""OLMo 2: norms after attention and MLP in place of those before, and norms over the whole query and key vectors."""

import dataclasses
from typing import Any

from flax import nnx

from eagle3_jax.models.blocks import MLP, Attention, RMSNorm, block_norm
from eagle3_jax.models.config import DecoderConfig, common_config
from eagle3_jax.models.family import Family


class Olmo2Attention(Attention):
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
        self.self_attn = Olmo2Attention(config)
        self.post_attention_layernorm = block_norm(config)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = block_norm(config)

    def __call__(self, x, angles, attend, cache):
        attended, cache = self.self_attn(x, angles, attend, cache)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(x)), cache


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    base = common_config({"rms_norm_eps": 1e-5} | raw, where)
    return dataclasses.replace(base, qk_norm=True, mlp_bias=False)


def block(config: DecoderConfig, layer: int) -> PostNormBlock:
    return PostNormBlock(config)


FAMILY = Family("Olmo2ForCausalLM", read, block)

"""Building blocks shared by targets and drafts. Attribute names are checkpoint names, so a flattened path is a key."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.models.attention import Attend
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.rope import rotate


class Linear(nnx.Module):
    """y = x W^T + b with W kept [out, in], the checkpoint's layout and the fast one on CPU (docs/performance.md)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        y = jnp.einsum("...i,oi->...o", x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Token embedding table [V, H]."""

    def __init__(self, vocab_size: int, hidden_size: int):
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size)))

    def __call__(self, ids: Int[Array, "*rows"]) -> Float[Array, "*rows H"]:
        return self.weight[...][ids]


class RMSNorm(nnx.Module):
    """w * x / sqrt(mean(x^2) + eps), the normalisation in float32, then cast back, then scaled (HF Llama order)."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        return rms_norm(x, self.weight[...], self.eps)


def rms_norm(
    x: Float[Array, "*rows H"], weight: Float[Array, "H"], eps: float | Float[Array, ""]
) -> Float[Array, "*rows H"]:
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight * normed.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. `inputs` is 2H in a draft's first layer, H elsewhere."""

    def __init__(self, config: DecoderConfig, inputs: int):
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(inputs, queries, config.attention_bias)
        self.k_proj = Linear(inputs, keys, config.attention_bias)
        self.v_proj = Linear(inputs, keys, config.attention_bias)
        self.o_proj = Linear(queries, config.hidden_size, config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.head_dim = config.head_dim

    def __call__(
        self, x: Float[Array, "B T inputs"], angles: tuple[Array, Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B T H"], Any]:
        q, k, v = (
            projection(x).reshape(*x.shape[:2], -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = attend(rotate(q, *angles), rotate(k, *angles), v, cache)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), cache


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig):
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Pre-norm decoder block: x + Attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: DecoderConfig):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x: Float[Array, "B T H"], angles: tuple[Array, Array], attend: Attend, cache: Any):
        attended, cache = self.self_attn(self.input_layernorm(x), angles, attend, cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache

"""Building blocks shared by targets and drafts. Attribute names are checkpoint names, so a flattened path is a key."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int8

from eagle3_jax.models.attention import Attend
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.rope import rotate


class Linear(nnx.Module):
    """y = x W^T + b with W kept [out, in], the checkpoint's layout and the fast one on CPU (docs/performance.md).

    scale: of each output channel where W holds int8 codes (`models.int8`), None where it holds the weights themselves.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None
        self.scale: nnx.Param | None = None

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        if self.scale is None:
            y = jnp.einsum("...i,oi->...o", x, self.weight[...])
        else:
            y = jnp.einsum("...i,oi->...o", x, widened(self.weight[...], x), preferred_element_type=jnp.float32)
            y = (y * self.scale[...]).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]


def widened(codes: Int8[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """int8 codes in the dtype of x, with which they are to be multiplied, exactly.

    On CPU two things make it quick (docs/performance.md): bfloat16 as the upper half of a float32, which holds all of a
    number of seven bits, and waiting for x, without which XLA widens all layers' codes before it computes the first.
    """

    def on_cpu(codes, x):
        codes, _ = jax.lax.optimization_barrier((codes, x))
        if x.dtype != jnp.bfloat16:
            return codes.astype(x.dtype)
        bits = jax.lax.bitcast_convert_type(codes.astype(jnp.float32), jnp.uint32)
        return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)

    return jax.lax.platform_dependent(codes, x, cpu=on_cpu, default=lambda codes, x: codes.astype(x.dtype))


class Embedding(nnx.Module):
    """Token embedding table [V, H]."""

    def __init__(self, vocab_size: int, hidden_size: int):
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size)))

    def __call__(self, ids: Int[Array, "*rows"]) -> Float[Array, "*rows H"]:
        return self.weight[...][ids]


class RMSNorm(nnx.Module):
    """w * x / sqrt(mean(x^2) + eps), the normalisation in float32, then cast back, then scaled (HF Llama order).

    offset: added to w (Gemma keeps w - 1); then the scaling is in float32 as well.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        return rms_norm(x, self.weight[...], self.eps, self.offset)


def rms_norm(
    x: Float[Array, "*rows H"], weight: Float[Array, "H"], eps: float | Float[Array, ""], offset: float = 0.0
) -> Float[Array, "*rows H"]:
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if offset:
        return ((offset + weight.astype(jnp.float32)) * normed).astype(x.dtype)
    return weight * normed.astype(x.dtype)


def block_norm(config: DecoderConfig) -> RMSNorm:
    """A norm over the residual stream or over what a block adds to it."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. `inputs` is 2H in a draft's first layer, H elsewhere."""

    def __init__(self, config: DecoderConfig, inputs: int):
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias or config.qkv_bias
        self.q_proj = Linear(inputs, queries, bias)
        self.k_proj = Linear(inputs, keys, bias)
        self.v_proj = Linear(inputs, keys, bias)
        self.o_proj = Linear(queries, config.hidden_size, config.attention_bias)
        size, eps, offset = config.head_dim, config.rms_norm_eps, config.norm_offset
        self.q_norm = RMSNorm(size, eps, offset) if config.qk_norm else None
        self.k_norm = RMSNorm(size, eps, offset) if config.qk_norm else None
        self.head_dim = config.head_dim
        self.scale, self.softcap = config.query_scale, config.attention_softcap

    def __call__(
        self, x: Float[Array, "B T inputs"], angles: tuple[Array, Array] | None, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "B T H"], Any]:
        """angles: cos and sin of the positions, None where the layer knows no positions (NoPE)."""
        q, k, v = self.heads(x)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        out, cache = attend(q, k, v, cache, **self.keywords())
        return self.o_proj(out.reshape(*x.shape[:2], -1)), cache

    def heads(self, x: Float[Array, "B T inputs"]) -> tuple[Array, Array, Array]:
        """Queries, keys and values [B, T, heads, head_dim], before the rotation."""
        q, k, v = (
            projection(x).reshape(*x.shape[:2], -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return (q, k, v) if self.q_norm is None else (self.q_norm(q), self.k_norm(k), v)

    def keywords(self) -> dict[str, Any]:
        """What `attend` is told besides the window: only what differs from plain scaled dot products."""
        told = {"scale": self.scale, "softcap": self.softcap}
        return {key: value for key, value in told.items() if value is not None}


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_fast": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def activation(name: str) -> Callable[[Array], Array]:
    """The function of a config's hidden_act (`config.ACTIVATIONS`)."""
    return _ACTIVATIONS[name]


class MLP(nnx.Module):
    """Gated MLP: down(act(gate(x)) * up(x)); act is silu in most families (SwiGLU)."""

    def __init__(self, config: DecoderConfig, inner: int | None = None):
        inner = config.intermediate_size if inner is None else inner
        self.gate_proj = Linear(config.hidden_size, inner, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, inner, config.mlp_bias)
        self.down_proj = Linear(inner, config.hidden_size, config.mlp_bias)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        return self.down_proj(activation(self.activation)(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Pre-norm decoder block: x + Attention(norm(x)), then x + MLP(norm(x)).

    attention, mlp: the family's own modules in place of the plain ones.
    """

    def __init__(self, config: DecoderConfig, attention: nnx.Module | None = None, mlp: nnx.Module | None = None):
        self.input_layernorm = block_norm(config)
        self.self_attn = Attention(config, config.hidden_size) if attention is None else attention
        self.post_attention_layernorm = block_norm(config)
        self.mlp = MLP(config) if mlp is None else mlp

    def __call__(self, x: Float[Array, "B T H"], angles: tuple[Array, Array] | None, attend: Attend, cache: Any):
        attended, cache = self.self_attn(self.input_layernorm(x), angles, attend, cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache

"""Mixtures of experts: a router sends each token through a few of many MLPs.

Kernels of all experts of a layer are one array [experts, out, in]. Tokens are sorted by expert and multiplied group by
group (`jax.lax.ragged_dot_general`). Our names, which a family's key map translates to: `mlp.gate` for the router,
`mlp.experts.{gate,up,down}_proj`, `mlp.shared_experts` for an MLP that every token goes through besides.
"""

import re
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.models.blocks import MLP, Linear, activation, widened
from eagle3_jax.models.config import DecoderConfig, ExpertsConfig

_GROUPED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class GroupedLinear(nnx.Module):
    """One linear layer an expert: weight [E, out, in], bias [E, out]; scale [E, out]: see `Linear`."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((experts, outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros((experts, outputs))) if bias else None
        self.scale: nnx.Param | None = None

    def __call__(
        self, rows: Float[Array, "R inputs"], expert: Int[Array, "R"], sizes: Int[Array, "E"]
    ) -> Float[Array, "R outputs"]:
        """rows sorted by expert; expert: of each row; sizes: rows of each expert."""
        weight = self.weight[...] if self.scale is None else widened(self.weight[...], rows)
        y = jax.lax.ragged_dot_general(rows, weight, sizes, _GROUPED)
        y = y if self.scale is None else (y * self.scale[...][expert]).astype(rows.dtype)
        return y if self.bias is None else y + self.bias[...][expert]


class Experts(nnx.Module):
    """The gated MLPs of a layer; `glu` joins gate and up: act(gate) * up unless a family says otherwise."""

    def __init__(self, config: DecoderConfig, bias: bool = False):
        count, inner = config.experts.count, config.experts.hidden_size
        self.gate_proj = GroupedLinear(count, config.hidden_size, inner, bias)
        self.up_proj = GroupedLinear(count, config.hidden_size, inner, bias)
        self.down_proj = GroupedLinear(count, inner, config.hidden_size, bias)
        self.count, self.activation = count, config.activation

    def __call__(
        self, x: Float[Array, "N H"], chosen: Int[Array, "N k"], weights: Float[Array, "N k"]
    ) -> Float[Array, "N H"]:
        """The weighted sum of the chosen experts' outputs for each token."""
        tokens, per_token = chosen.shape
        order = jnp.argsort(chosen.reshape(-1))
        expert = chosen.reshape(-1)[order]
        sizes = jnp.bincount(expert, length=self.count).astype(jnp.int32)
        rows = x[order // per_token]
        inner = self.glu(self.gate_proj(rows, expert, sizes), self.up_proj(rows, expert, sizes))
        out = self.down_proj(inner, expert, sizes)
        # Back into the order of tokens: a sum of k rows each, in the same order on every device.
        out = out[jnp.argsort(order)].reshape(tokens, per_token, -1)
        return jnp.einsum("nkh,nk->nh", out, weights.astype(out.dtype))

    def glu(self, gate: Float[Array, "R I"], up: Float[Array, "R I"]) -> Float[Array, "R I"]:
        return activation(self.activation)(gate) * up


class Mixture(nnx.Module):
    """Router and experts in place of an MLP. `route` chooses: softmax over all, then the likeliest (Mixtral, Qwen)."""

    def __init__(self, config: DecoderConfig, router_bias: bool = False, experts: Experts | None = None):
        self.gate = Linear(config.hidden_size, config.experts.count, router_bias)
        self.experts = Experts(config) if experts is None else experts
        shared = config.experts.shared * config.experts.hidden_size
        self.shared_experts = MLP(config, shared) if shared else None
        self.facts = config.experts

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(rows)
        out = self.experts(rows, chosen, weights).reshape(x.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def route(self, rows: Float[Array, "N H"]) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
        """The experts of each token and their float32 weights."""
        shares = jax.nn.softmax(self.gate(rows).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(shares, self.facts.per_token)
        if self.facts.normalise:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return chosen, weights


def stacked(tensors: Iterable[tuple[str, np.ndarray]], facts: ExpertsConfig) -> Iterator[tuple]:
    """(name, array, expert) for kernels stored one an expert, (name, array) for everything else.

    Kernels fused over experts, `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I], are taken apart.
    """
    for name, array in tensors:
        single = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+_proj\.weight)", name)
        if single and int(single[2]) < facts.count:
            yield f"{single[1]}.{single[3]}", array, int(single[2])
        elif name.endswith(".experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), np.split(array, 2, axis=1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}.weight", half
        elif name.endswith(".experts.down_proj"):
            yield f"{name}.weight", array
        else:
            yield name, array

"""gpt-oss: attention sinks, sliding and full layers by turns, experts with biases and a clamped SwiGLU.

The published weights of the experts are MXFP4 (`models.quantised`); they are stored [E, out, in] there and [E, in, out]
where unquantised, rows of gate and up interleaved in both.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.models.blocks import Attention, Block
from eagle3_jax.models.config import (
    DecoderConfig,
    ExpertsConfig,
    common_config,
    counts,
    kinds_by_period,
    positive_numbers,
    windows_of,
)
from eagle3_jax.models.experts import Experts, Mixture
from eagle3_jax.models.family import Family, Placed, Stored

KEYS = ("num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token", "swiglu_limit", "swiglu_alpha")
KEYS += ("initial_context_length",)
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
ROPE |= {"truncate": False, "original_max_position_embeddings": 4096}


class SinkAttention(Attention):
    """Each head has one more logit in its softmax, which takes weight away from the tokens."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config, config.hidden_size)
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,)))

    def keywords(self):
        return super().keywords() | {"sinks": self.sinks[...]}


class ClampedExperts(Experts):
    """(up + 1) * gate * sigmoid(alpha * gate), both clamped."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config, bias=True)
        self.alpha, self.limit = config.experts.alpha, config.experts.limit

    def glu(self, gate, up):
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class GptOssMixture(Mixture):
    """The likeliest experts, weighted by a softmax over these alone."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config, router_bias=True, experts=ClampedExperts(config))

    def route(self, rows):
        logits, chosen = jax.lax.top_k(self.gate(rows), self.facts.per_token)
        return chosen, jax.nn.softmax(logits.astype(jnp.float32), axis=-1)


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = DEFAULTS | raw
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw["rope_parameters"] = ROPE
    raw["num_local_experts"] = raw.get("num_local_experts") or raw.get("num_experts") or 128
    base = common_config(raw, where, KEYS, activations=("silu",), default_theta=150000.0)
    counts(raw, where, "num_local_experts", "num_experts_per_tok")
    positive_numbers(raw, where, "swiglu_alpha", "swiglu_limit")
    experts = ExpertsConfig(
        count=raw["num_local_experts"],
        per_token=raw["num_experts_per_tok"],
        hidden_size=base.intermediate_size,
        alpha=float(raw["swiglu_alpha"]),
        limit=float(raw["swiglu_limit"]),
    )
    kinds = raw.get("layer_types") or kinds_by_period(raw, 2)
    windows = windows_of(raw, where, kinds, raw["sliding_window"])
    return dataclasses.replace(base, mlp_bias=False, experts=experts, windows=windows)


def block(config: DecoderConfig, layer: int) -> Block:
    return Block(config, SinkAttention(config), GptOssMixture(config))


def place(config: DecoderConfig, tensors: Stored) -> Placed:
    for name, array, *expert in tensors:
        found = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?", name)
        if not found:
            yield name.replace(".mlp.router.", ".mlp.gate."), array
            continue
        prefix, kernel, bias = found.groups()
        leaf, rows = ("bias", array) if bias else ("weight", np.swapaxes(array, -1, -2))
        if kernel == "down_proj":
            yield f"{prefix}.down_proj.{leaf}", rows, *expert
        else:
            for start, part in enumerate(("gate_proj", "up_proj")):
                half = rows[..., start::2] if bias else rows[..., start::2, :]
                yield f"{prefix}.{part}.{leaf}", half, *expert


FAMILY = Family("GptOssForCausalLM", read, block, place)

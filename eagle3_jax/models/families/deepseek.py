"""DeepSeek V3, R1 and Kimi K2: latent attention (MLA), routed and shared experts, the first layers dense."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from eagle3_jax.errors import UserError
from eagle3_jax.models.blocks import Block, Linear, RMSNorm
from eagle3_jax.models.config import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    common_config,
    counts,
    no_windows,
    positive_numbers,
)
from eagle3_jax.models.experts import Mixture, stacked
from eagle3_jax.models.family import Family, Placed, Stored
from eagle3_jax.models.rope import rotate

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts")
SIZES += ("num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
OPTIONS = ("q_lora_rank", "rope_interleave", "num_local_experts", "n_shared_experts", "norm_topk_prob")
OPTIONS += ("routed_scaling_factor", "first_k_dense_replace")
FIXED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}  # written, and never another value
TRAINING = ("num_nextn_predict_layers", "num_mtp_layers", "ep_size", "seq_aux", "aux_loss_alpha", "qk_head_dim")
DEFAULTS = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
LATENT_EPS = 1e-6  # of the norms inside the attention, whatever rms_norm_eps is


class LatentAttention(nnx.Module):
    """Keys and values of all heads come from one latent vector a token and one rotated key that the heads share.

    Expanded keys and values are cached: N heads of nope + rope and of value dimensions.
    """

    def __init__(self, config: DecoderConfig):
        facts, heads, size = config.latent, config.num_heads, config.hidden_size
        bias = config.attention_bias
        if facts.q_rank is None:
            self.q_proj = Linear(size, heads * config.head_dim)
        else:
            self.q_a_proj = Linear(size, facts.q_rank, bias)
            self.q_a_layernorm = RMSNorm(facts.q_rank, LATENT_EPS)
            self.q_b_proj = Linear(facts.q_rank, heads * config.head_dim)
        self.kv_a_proj_with_mqa = Linear(size, facts.kv_rank + facts.rope_dim, bias)
        self.kv_a_layernorm = RMSNorm(facts.kv_rank, LATENT_EPS)
        self.kv_b_proj = Linear(facts.kv_rank, heads * (facts.nope_dim + facts.value_dim))
        self.o_proj = Linear(heads * facts.value_dim, size, bias)
        self.facts, self.heads, self.scale = facts, heads, config.query_scale

    def __call__(self, x: Float[Array, "B T H"], angles, attend, cache):
        facts, rows = self.facts, x.shape[:2]
        wide = self.q_proj(x) if facts.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_plain, q_turned = jnp.split(wide.reshape(*rows, self.heads, -1), [facts.nope_dim], axis=-1)
        latent, k_turned = jnp.split(self.kv_a_proj_with_mqa(x), [facts.kv_rank], axis=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).reshape(*rows, self.heads, -1)
        k_plain, v = jnp.split(expanded, [facts.nope_dim], axis=-1)
        q_turned, k_turned = self._rotate(q_turned, angles), self._rotate(k_turned[:, :, None], angles)
        k_turned = jnp.broadcast_to(k_turned, (*rows, self.heads, facts.rope_dim))
        q, k = jnp.concatenate([q_plain, q_turned], axis=-1), jnp.concatenate([k_plain, k_turned], axis=-1)
        out, cache = attend(q, k, v, cache, scale=self.scale)
        return self.o_proj(out.reshape(*rows, -1)), cache

    def _rotate(self, x: Float[Array, "B T N D"], angles) -> Float[Array, "B T N D"]:
        if self.facts.interleaved:  # pairs (2i, 2i+1) to (i, i + D/2); scores do not depend on the order
            x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return rotate(x, *angles)


class SigmoidMixture(Mixture):
    """Scores are sigmoids; a learned bias takes part in the choice of groups and experts, not in their weights."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.gate.e_score_correction_bias = nnx.Param(jnp.zeros((config.experts.count,)))

    def route(self, rows):
        facts = self.facts
        logits = rows.astype(jnp.float32) @ self.gate.weight[...].astype(jnp.float32).T
        scores = jax.nn.sigmoid(logits)
        biased = scores + self.gate.e_score_correction_bias[...].astype(jnp.float32)
        grouped = biased.reshape(len(rows), facts.groups, -1)
        best_two = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        kept = jax.lax.top_k(best_two, facts.groups_kept)[1]
        allowed = jnp.any(kept[..., None] == jnp.arange(facts.groups), axis=1)
        biased = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased.shape)
        chosen = jax.lax.top_k(biased, facts.per_token)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if facts.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * facts.scaling


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = DEFAULTS | raw
    raw["n_routed_experts"] = raw.get("n_routed_experts", raw.get("num_local_experts"))
    for key, value in FIXED.items():
        if raw.get(key, value) != value:
            raise UserError(f"{where} has {key} {raw[key]!r} / only {value!r} is supported, that of DeepSeek V3")
    for key in ("n_shared_experts", "first_k_dense_replace"):
        raw[key] = 0 if raw[key] is None else raw[key]
    counts(raw, where, *SIZES, *["q_lora_rank"] * (raw["q_lora_rank"] is not None))
    counts(raw, where, "n_shared_experts", "first_k_dense_replace", least=0)
    positive_numbers(raw, where, "routed_scaling_factor")
    if raw.get("num_key_value_heads") not in (None, raw.get("num_attention_heads")):
        raise UserError(f"{where} has num_key_value_heads {raw['num_key_value_heads']} / MLA has one a query head")
    rope_dim, nope_dim = raw["qk_rope_head_dim"], raw["qk_nope_head_dim"]
    # head_dim in a file of this family is that of the rotation
    base = common_config(raw | {"head_dim": rope_dim}, where, (*SIZES, *OPTIONS, *FIXED, *TRAINING))
    no_windows(raw, where)
    experts = ExpertsConfig(
        count=raw["n_routed_experts"],
        per_token=raw["num_experts_per_tok"],
        hidden_size=raw["moe_intermediate_size"],
        normalise=bool(raw["norm_topk_prob"]),
        dense_layers=tuple(range(min(raw["first_k_dense_replace"], base.num_layers))),
        shared=raw["n_shared_experts"],
        groups=raw["n_group"],
        groups_kept=raw["topk_group"],
        scaling=float(raw["routed_scaling_factor"]),
    )
    if experts.count % experts.groups or experts.count // experts.groups < 2:
        raise UserError(f"{where}: {experts.count} experts do not divide into {experts.groups} groups of two or more")
    latent = LatentConfig(
        raw["q_lora_rank"], raw["kv_lora_rank"], nope_dim, rope_dim, raw["v_head_dim"], bool(raw["rope_interleave"])
    )
    return dataclasses.replace(
        base,
        num_kv_heads=base.num_heads,
        head_dim=nope_dim + rope_dim,
        value_dim=raw["v_head_dim"],
        query_scale=(nope_dim + rope_dim) ** -0.5 * _yarn_scale(base) ** 2,
        mlp_bias=False,
        latent=latent,
        experts=experts,
    )


def _yarn_scale(config: DecoderConfig) -> float:
    """Scores grow with the stretch of the context: 0.1 mscale_all_dim ln(factor) + 1."""
    weight, factor = config.rope.get("mscale_all_dim", 0), config.rope.get("factor", 1.0)
    return 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1 else 1.0


def block(config: DecoderConfig, layer: int) -> Block:
    dense = layer in config.experts.dense_layers
    return Block(config, LatentAttention(config), None if dense else SigmoidMixture(config))


def place(config: DecoderConfig, tensors: Stored) -> Placed:
    """Experts stacked. Left out: the layers behind the last, which predict further tokens (MTP), and the empty kernels
    that transformers stores for no shared experts."""

    def kept(name: str, array: np.ndarray) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return array.size > 0 and (layer is None or int(layer[1]) < config.num_layers)

    return stacked(((name, array) for name, array in tensors if kept(name, array)), config.experts)


FAMILY = Family("DeepseekV3ForCausalLM", read, block, place, float32=("e_score_correction_bias",))

"""Qwen 3 MoE and Mixtral: the MLP is a mixture of experts, chosen by softmax; the rest is Qwen 3 and Mistral."""

import dataclasses
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.models.blocks import Block
from eagle3_jax.models.config import DecoderConfig, ExpertsConfig, common_config, counts, one_window
from eagle3_jax.models.experts import Mixture, stacked
from eagle3_jax.models.family import Family, Placed, Stored

QWEN_KEYS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers"),
)
QWEN_DEFAULTS = {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN_DEFAULTS |= {"max_position_embeddings": 32768}
MIXTRAL_KEYS = ("num_local_experts", "num_experts_per_tok", "router_jitter_noise")
MIXTRAL_DEFAULTS = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
MIXTRAL_DEFAULTS |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
MIXTRAL_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def read_qwen3_moe(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = QWEN_DEFAULTS | raw
    raw["num_experts"] = raw.get("num_experts", raw.get("num_local_experts", 128))  # transformers 5 writes the latter
    base = common_config(raw, where, QWEN_KEYS)
    counts(raw, where, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    layers = range(base.num_layers)
    listed = isinstance(dense, list) and all(type(layer) is int for layer in dense)
    if not listed or type(step) is not int or step < 1:
        raise UserError(f"{where} has mlp_only_layers {dense} and decoder_sparse_step {step!r} / correct them")
    experts = ExpertsConfig(
        count=raw["num_experts"],
        per_token=raw["num_experts_per_tok"],
        hidden_size=raw["moe_intermediate_size"],
        normalise=bool(raw.get("norm_topk_prob", False)),
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    )
    windows = one_window(raw, where, raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None)
    return dataclasses.replace(base, qk_norm=True, mlp_bias=False, experts=experts, windows=windows)


def read_mixtral(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = MIXTRAL_DEFAULTS | raw
    base = common_config(raw, where, MIXTRAL_KEYS, default_theta=1e6)
    counts(raw, where, "num_local_experts", "num_experts_per_tok")
    return dataclasses.replace(
        base,
        attention_bias=False,
        mlp_bias=False,
        experts=ExpertsConfig(raw["num_local_experts"], raw["num_experts_per_tok"], base.intermediate_size),
        windows=one_window(raw, where, raw.get("sliding_window")),
    )


def block(config: DecoderConfig, layer: int) -> Block:
    return Block(config, mlp=None if layer in config.experts.dense_layers else Mixture(config))


def place_qwen3_moe(config: DecoderConfig, tensors: Stored) -> Placed:
    return stacked(tensors, config.experts)


def place_mixtral(config: DecoderConfig, tensors: Stored) -> Placed:
    def renamed(name: str) -> str:
        name = name.replace(".block_sparse_moe.", ".mlp.")
        head, _, layer = name.removesuffix(".weight").rpartition(".")
        return f"{head}.{MIXTRAL_NAMES[layer]}.weight" if ".experts." in name and layer in MIXTRAL_NAMES else name

    return stacked(((renamed(name), array) for name, array in tensors), config.experts)


QWEN3_MOE = Family("Qwen3MoeForCausalLM", read_qwen3_moe, block, place_qwen3_moe)
MIXTRAL = Family("MixtralForCausalLM", read_mixtral, block, place_mixtral)

"""Qwen 2 and 2.5 (biases of q, k and v) and Qwen 3 (a norm over each head's query and key); windows from a layer on."""

import dataclasses
from typing import Any

from eagle3_jax.models.config import DecoderConfig, common_config, kinds_from_layer, windows_of
from eagle3_jax.models.family import Family

KEYS = ("max_window_layers",)
QWEN2_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
QWEN3_DEFAULTS = QWEN2_DEFAULTS | {"head_dim": 128}


def windows(raw: dict[str, Any], where: str) -> tuple[int | None, ...]:
    """use_sliding_window is off unless given; then layers from max_window_layers on have it."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types") or (kinds_from_layer(raw, where) if window else [])
    return windows_of(raw, where, kinds, window)


def read_qwen2(raw: dict[str, Any], where: str) -> DecoderConfig:
    base = common_config(QWEN2_DEFAULTS | raw, where, KEYS)
    return dataclasses.replace(base, qkv_bias=True, attention_bias=False, mlp_bias=False, windows=windows(raw, where))


def read_qwen3(raw: dict[str, Any], where: str) -> DecoderConfig:
    base = common_config(QWEN3_DEFAULTS | raw, where, KEYS)
    return dataclasses.replace(base, qk_norm=True, mlp_bias=False, windows=windows(raw, where))


QWEN2 = Family("Qwen2ForCausalLM", read_qwen2)
QWEN3 = Family("Qwen3ForCausalLM", read_qwen3)

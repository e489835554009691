"""Mistral: a Llama whose layers all look back over one sliding window, if there is one."""

import dataclasses
from typing import Any

from eagle3_jax.models.config import DecoderConfig, common_config, one_window
from eagle3_jax.models.family import Family

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = DEFAULTS | raw
    base = common_config(raw, where)
    windows = one_window(raw, where, raw["sliding_window"])
    # Transformers reads no biases here, nor do the servers.
    return dataclasses.replace(base, windows=windows, attention_bias=False, mlp_bias=False)


FAMILY = Family("MistralForCausalLM", read)

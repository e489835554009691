"""Mistral: a Llama whose layers all look back over one sliding window, if there is one."""

import dataclasses
from typing import Any

from eagle3_jax.models.config import SLIDING, DecoderConfig, common_config, windows_of
from eagle3_jax.models.family import Family

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = DEFAULTS | raw
    base = common_config(raw, where)
    window = raw["sliding_window"]
    kinds = raw.get("layer_types") or ([SLIDING] * base.num_layers if window else [])
    # Transformers reads no biases here, nor do the servers.
    return dataclasses.replace(
        base, windows=windows_of(raw, where, kinds, window), attention_bias=False, mlp_bias=False
    )


FAMILY = Family("MistralForCausalLM", read)

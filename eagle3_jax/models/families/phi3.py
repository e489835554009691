"""Phi 3, 3.5 and 4: fused q/k/v and gate/up projections, LongRoPE, rotation of a part of each head (Phi 4 mini)."""

import dataclasses
from typing import Any

import numpy as np

from eagle3_jax.models.config import DecoderConfig, common_config, one_window
from eagle3_jax.models.family import Family, Placed, Stored

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = DEFAULTS | raw
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        # Microsoft's first files call LongRoPE "su" or, with the same factors, "yarn".
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            raw[key] = {k: v for k, v in rope.items() if k != "type"} | {"rope_type": "longrope"}
    base = common_config(raw, where, ("embd_pdrop", "resid_pdrop"), partial=True)
    windows = one_window(raw, where, raw.get("sliding_window"))
    return dataclasses.replace(base, windows=windows, attention_bias=False, mlp_bias=False)


def place(config: DecoderConfig, tensors: Stored) -> Placed:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), (queries, queries + keys)),
        "gate_up_proj": (("gate_proj", "up_proj"), (config.intermediate_size,)),
    }
    for name, array in tensors:
        prefix, _, layer = name.removesuffix(".weight").rpartition(".")
        if layer in fused:
            parts, borders = fused[layer]
            for part, rows in zip(parts, np.split(array, borders), strict=True):
                yield f"{prefix}.{part}.weight", rows
        else:
            yield name, array


FAMILY = Family("Phi3ForCausalLM", read, place=place)

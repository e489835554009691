"""SmolLM3: a Llama in which every fourth layer knows no positions (NoPE)."""

import dataclasses
from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.models.config import FULL, SLIDING, DecoderConfig, common_config, counts, windows_of
from eagle3_jax.models.family import Family

KEYS = ("no_rope_layers", "no_rope_layer_interval")
DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 32768}
DEFAULTS |= {"no_rope_layer_interval": 4}


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    raw = DEFAULTS | raw
    base = common_config(raw, where, KEYS, default_theta=2e6)
    rotated = raw.get("no_rope_layers")  # named after the others: 1 = this layer does rotate
    if rotated is None:
        counts(raw, where, "no_rope_layer_interval")
        rotated = [int((layer + 1) % raw["no_rope_layer_interval"] != 0) for layer in range(base.num_layers)]
    if not isinstance(rotated, list) or len(rotated) < base.num_layers or any(flag not in (0, 1) for flag in rotated):
        raise UserError(f"{where} has no_rope_layers {rotated} / it must hold 0 or 1 for each layer")
    rotated = rotated[: base.num_layers]
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types") or [FULL if flag or window is None else SLIDING for flag in rotated]
    return dataclasses.replace(
        base,
        layer_ropes=tuple(base.rope if flag else None for flag in rotated),
        windows=windows_of(raw, where, kinds, window),
    )


FAMILY = Family("SmolLM3ForCausalLM", read)

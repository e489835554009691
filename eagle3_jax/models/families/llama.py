"""Llama 2 and 3 (SmolLM2, TinyLlama and others use the same code): the plain decoder, nothing differs."""

from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.models.config import DecoderConfig, common_config
from eagle3_jax.models.family import Family


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    config = common_config(raw, where)
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window or "sliding_attention" in (raw.get("layer_types") or []):
        raise UserError(f"{where} has sliding windows / a Llama has full attention only; is it a Mistral?")
    return config


FAMILY = Family("LlamaForCausalLM", read)

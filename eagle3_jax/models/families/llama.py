"""Llama 2 and 3 (SmolLM2, TinyLlama and others use the same code): the plain decoder, nothing differs."""

from typing import Any

from eagle3_jax.models.config import DecoderConfig, common_config, no_windows
from eagle3_jax.models.family import Family


def read(raw: dict[str, Any], where: str) -> DecoderConfig:
    config = common_config(raw, where)
    no_windows(raw, where)
    return config


FAMILY = Family("LlamaForCausalLM", read)

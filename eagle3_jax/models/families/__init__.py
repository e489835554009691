"""The families of targets by the name in `config.json: architectures`."""

from typing import Any

from eagle3_jax.errors import UserError
from eagle3_jax.models.families import deepseek, gemma, gpt_oss, llama, mistral, moe, olmo, phi3, qwen, smollm3
from eagle3_jax.models.families.text_parts import WRAPPERS, architecture_of, text_family
from eagle3_jax.models.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    moe.QWEN3_MOE,
    moe.MIXTRAL,
    phi3.FAMILY,
    gemma.GEMMA2,
    gemma.GEMMA3,
    smollm3.FAMILY,
    olmo.OLMO2,
    olmo.OLMO3,
    gpt_oss.FAMILY,
    deepseek.FAMILY,
)


def family_of(raw: dict[str, Any], where: str) -> Family:
    """The family of a config.json. UserError for an unknown architecture, and for one that wraps another text model."""
    name = architecture_of(raw)
    if (part := text_family(raw, where)) is not None:
        return part
    for family in FAMILIES:
        if family.architecture == name:
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    if isinstance(raw.get("text_config"), dict):
        inner = raw["text_config"].get("model_type", "text")
        raise UserError(
            f"{name} wraps a {inner} model with other inputs, such as images / {where} / save the text model alone "
            f"(transformers: model.language_model) as one of: {supported}; text is read out of: {', '.join(WRAPPERS)}"
        )
    raise UserError(f"target architecture {name} is not supported / {where} / supported: {supported}")

"""The text model within a model with images: Gemma 3, Mistral Small 3, LLaVA, Qwen-VL. Images are not read.

Its config.json is the `text_config` of the whole one (in older Qwen-VL files it lies between the other keys), its
tensors have a prefix. On text alone the whole model computes what the text model does.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from eagle3_jax.errors import UserError
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.families import gemma, llama, mistral, qwen
from eagle3_jax.models.family import Family, Placed, Stored


class TextModel(NamedTuple):
    """defaults: what keys mean that a text_config leaves out; theta: the same for the base of the rotation."""

    family: Family
    defaults: dict[str, Any]
    theta: float | None = None


def _sizes(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    return sizes | {"num_hidden_layers": layers, "num_attention_heads": heads}


_QWEN_VL = _sizes(152064, 8192, 29568, 80, 64)
_QWEN_VL |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80}
_QWEN3_VL = _sizes(151936, 4096, 22016, 32, 32) | {"max_position_embeddings": 128000}
TEXT_MODELS = {
    "gemma3_text": TextModel(gemma.GEMMA3, _sizes(262208, 2304, 9216, 26, 8)),
    "llama": TextModel(llama.FAMILY, _sizes(32000, 4096, 11008, 32, 32)),
    "mistral": TextModel(mistral.FAMILY, _sizes(32000, 4096, 14336, 32, 32)),
    "qwen2": TextModel(qwen.QWEN2, _sizes(151936, 4096, 22016, 32, 32)),
    "qwen2_vl_text": TextModel(qwen.QWEN2, _QWEN_VL, 1e6),
    "qwen2_5_vl_text": TextModel(qwen.QWEN2, _QWEN_VL, 1e6),
    "qwen3_vl_text": TextModel(qwen.QWEN3, _QWEN3_VL, 5e5),
}
# Architecture -> model_type of its text_config, should that not state it.
WRAPPERS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
}
_PREFIX = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?(?=(?:embed_tokens|layers|norm)\.)")
_HEAD = re.compile(r"^language_model\.(?=lm_head\.)")
_OTHERS = re.compile(r"(?:model\.)?(?:vision_tower|visual|multi_modal_projector|image_newline)\b")
_IMAGES = ("vision_", "image_", "video_")  # what keys begin with that do not concern the text model


def architecture_of(raw: dict[str, Any]) -> str:
    """The first name in `architectures`."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "none"


def text_family(raw: dict[str, Any], where: str) -> Family | None:
    """The family of the text model within; None if config.json is of no model with images. UserError for a text model
    that is not read."""
    wrapper = architecture_of(raw)
    if wrapper not in WRAPPERS:
        return None
    kind = _text_type(raw)
    if kind not in TEXT_MODELS:
        known = ", ".join(TEXT_MODELS)
        raise UserError(f"{wrapper} with a text model of type {kind} is not supported / {where} / supported: {known}")
    family = TEXT_MODELS[kind].family

    def place(config: DecoderConfig, tensors: Stored) -> Placed:
        return family.place(config, _text_tensors(tensors))

    return dataclasses.replace(family, architecture=wrapper, place=place)


def lifted(raw: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The config.json of the text model within, with the whole one's `architectures`; any other one as it is.

    names: of the stored tensors.
    """
    wrapper = architecture_of(raw)
    if wrapper not in WRAPPERS or _text_type(raw) not in TEXT_MODELS:
        return raw
    _, defaults, theta = TEXT_MODELS[_text_type(raw)]
    nested = raw.get("text_config")
    flat = {key: value for key, value in raw.items() if not key.startswith(_IMAGES)}
    text = defaults | (nested if isinstance(nested, dict) else flat)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(key), dict):
            text[key] = _without_grids(text[key])
    if theta and not any("rope_theta" in (text.get(key) or {}) for key in ("rope_parameters", "rope_scaling")):
        text.setdefault("rope_theta", theta)
    # Old files state it for the text model, new ones for the whole; where these differ, the tensors tell.
    tied = [level["tie_word_embeddings"] for level in (raw, text) if "tie_word_embeddings" in level]
    if tied:
        has_head = any(name.endswith("lm_head.weight") for name in names)
        text["tie_word_embeddings"] = tied[0] if tied[0] == tied[-1] else not has_head
    return text | {key: raw[key] for key in ("architectures", "quantization_config", "eos_token_id") if key in raw}


def _text_type(raw: dict[str, Any]) -> str:
    nested = raw.get("text_config")
    kind = nested.get("model_type") if isinstance(nested, dict) else None
    return kind if isinstance(kind, str) else WRAPPERS[architecture_of(raw)]


def _without_grids(rope: dict[str, Any]) -> dict[str, Any]:
    """The rotation of text, whose tokens have one position; tokens of images have three (M-RoPE)."""
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def _text_tensors(tensors: Stored) -> Placed:
    """Names of the text model alone; what belongs to images is left out."""
    for name, *tensor in tensors:
        if not _OTHERS.match(name):
            yield _HEAD.sub("", _PREFIX.sub("model.", name)), *tensor

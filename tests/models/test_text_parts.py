"""Text models within models with images: loaded as the text model alone is, or refused by name."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax.models.families import family_of
from eagle3_jax.models.families.text_parts import lifted

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "targets"
TIED = {"tie_word_embeddings": True}
IMAGES = {"vision_config": {"hidden_size": 8}, "image_token_id": 3, "model_type": "whole"}


def wrapped(
    folder: Path, case: str, wrapper: str, prefixes: tuple[str, str, str], text: dict, whole: dict | None
) -> Path:
    """A golden text model as that of a model with images. prefixes: of its body, its head, and the images' tensors.

    text: changes of its config, None takes a key away; whole: keys beside the text_config, None = there is none.
    """
    folder.mkdir()
    body, head, images = prefixes
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    raw = {key: value for key, value in (raw | text).items() if value is not None}
    own = IMAGES | {"architectures": [wrapper]}
    raw = raw | own if whole is None else own | {"text_config": raw} | whole
    (folder / "config.json").write_text(json.dumps(raw))
    stored = load_file(GOLDEN / case / "model.safetensors")
    renamed = {name.replace("model.", body, 1).replace("lm_head.", head): array for name, array in stored.items()}
    save_file(renamed | {f"{images}.norm.weight": np.ones(8, np.float32)}, folder / "model.safetensors")
    return folder


OLD = ("language_model.model.", "language_model.lm_head.", "vision_tower")
NEW = ("model.language_model.", "lm_head.", "model.visual")
FLAT = ("model.", "lm_head.", "visual")
GRIDS = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_parameters": None, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("wrapper", "case", "prefixes", "text", "whole"),
    [
        ("Gemma3ForConditionalGeneration", "gemma3_tiny", OLD, {"model_type": None}, {}),
        ("Mistral3ForConditionalGeneration", "mistral_tiny", OLD, {"tie_word_embeddings": None}, TIED),
        ("LlavaForConditionalGeneration", "llama_tiny", NEW, {}, TIED),  # and yet not: its head is stored
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_tiny", FLAT, GRIDS, None),
    ],
)
def test_the_text_model_is_the_one_it_is_alone(tmp_path: Path, wrapper: str, case: str, prefixes, text, whole) -> None:
    alone = e3.load_target(GOLDEN / case, "float32")
    within = e3.load_target(wrapped(tmp_path / "m", case, wrapper, prefixes, text, whole), "float32")
    assert within.config == alone.config and within.eos_token_ids == alone.eos_token_ids
    assert within.architecture == wrapper
    jax.tree.map(np.testing.assert_array_equal, within.params, alone.params)


def test_what_a_text_config_leaves_out_is_what_transformers_takes_for_it() -> None:
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    raw["text_config"] = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    raw["text_config"] |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    text = lifted(raw, ["language_model.model.norm.weight"])
    config = family_of(raw, "here").read(text, "here")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.tie_embeddings, config.max_positions, config.hidden_size) == (True, 131072, 2560)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024) and text["eos_token_id"] == [1, 106]
    assert (config.layer_ropes[5].theta, config.layer_ropes[5].kind, config.layer_ropes[0].theta) == (
        1e6,
        "linear",
        1e4,
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}},
            "Mistral3ForConditionalGeneration with a text model of type ministral3 is not supported / here / supported",
        ),
        (
            {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"model_type": "llama4_text"}},
            "Llama4ForConditionalGeneration wraps a llama4_text model .* / here / save the text model alone",
        ),
        (
            {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {}},
            "Gemma3nForConditionalGeneration wraps a text model .* text is read out of: Gemma3ForConditionalGeneration",
        ),
    ],
)
def test_others_are_refused_by_name(raw: dict, message: str) -> None:
    with pytest.raises(e3.UserError, match=message):
        family_of(raw, "here")

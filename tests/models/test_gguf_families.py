"""GGUF files of Qwen 2, Qwen 3 and Gemma 3: the same model as the Hugging Face folder; Gemma's tokenizer."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax.errors import UserError
from eagle3_jax.models.gguf_tokenizer import gguf_tokenizer

gguf = pytest.importorskip("gguf", reason="the `demo` extra (gguf) is not installed")
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "targets"


def write(path: Path, architecture: str, raw: dict, tensors: dict[str, np.ndarray], extra=lambda writer: None) -> Path:
    """A GGUF as llama.cpp's converter writes it, names from gguf's own table."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    extra(writer)
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), raw["num_hidden_layers"])
    for name, array in tensors.items():
        shift = 1 if architecture == "gemma3" and name.endswith("norm.weight") else 0
        writer.add_tensor(table.get_name(name, (".weight", ".bias")), array + np.float32(shift))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_gemma(writer) -> None:
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(5)
    writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True])
    writer.add_float32("gemma3.final_logit_softcapping", 4.0)


def of_qwen3(writer) -> None:
    writer.add_rope_freq_base(1e4)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


@pytest.mark.parametrize(
    ("name", "extra", "changes"),
    [
        ("qwen2", lambda writer: writer.add_rope_freq_base(1e4), {"use_sliding_window": False, "layer_types": None}),
        ("qwen3", of_qwen3, {"attention_bias": False}),
        ("gemma3", of_gemma, {"query_pre_attn_scalar": 12}),  # what a GGUF cannot say: llama.cpp takes the head size
    ],
)
def test_a_gguf_is_the_model_of_its_folder(tmp_path: Path, name: str, extra, changes: dict) -> None:
    folder = GOLDEN / f"{name}_tiny"
    raw = json.loads((folder / "config.json").read_text()) | changes
    tensors = load_file(folder / "model.safetensors")
    if not raw.get("attention_bias", True) and name == "qwen3":
        tensors = {key: array for key, array in tensors.items() if not key.endswith(".bias")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    ours = e3.load_target(write(tmp_path / "m.gguf", name, raw, tensors, extra), "float32")
    theirs = e3.load_target(tmp_path, "float32")
    eps = theirs.config.rms_norm_eps
    assert dataclasses.replace(ours.config, rms_norm_eps=eps) == theirs.config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours.params, theirs.params)


# --- Gemma's tokenizer

PIECES = [
    "<pad>",
    "<bos>",
    "<unk>",
    "<turn>",
    "\u2581\u2581",
    "<0x07>",
    "\u2581",
    "a",
    "b",
    "c",
    "ab",
    "bc",
    "\u2581ab",
    "[PAD13]",  # a row of the embedding without a token
]
KINDS = [3, 3, 2, 3, 4, 6, 1, 1, 1, 1, 1, 1, 1, 5]
SCORES = [-1000.0] * 5 + [0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -1000.0]


def write_pieces(path: Path, space: bool = False, architecture: str = "gemma3") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(PIECES)
    writer.add_token_scores(SCORES)
    writer.add_token_types(KINDS)
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(space)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", ["ab"]),
        ("abc", ["a", "bc"]),  # bc has the higher score
        ("b ab", ["b", "\u2581ab"]),
        ("b  ab", ["b", "\u2581\u2581", "ab"]),  # a user-defined piece comes before all others
        ("a\x07", ["a", "<0x07>"]),
        ("a<turn>b", ["a", "<turn>", "b"]),
    ],
)
def test_pieces_are_merged_by_their_scores(tmp_path: Path, text: str, pieces: list[str]) -> None:
    tokenizer = gguf_tokenizer(write_pieces(tmp_path / "t.gguf"))
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", *pieces]
    assert tokenizer.decode(ids[1:]) == text


def test_other_sentencepiece_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="add_space_prefix is not supported"):
        gguf_tokenizer(write_pieces(tmp_path / "a.gguf", space=True))
    with pytest.raises(UserError, match="'llama' with pre-tokenizer 'default' is not supported"):
        gguf_tokenizer(write_pieces(tmp_path / "b.gguf", architecture="llama"))

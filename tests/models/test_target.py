"""The Llama target against Hugging Face's numbers and a NumPy decoder; what a loader must refuse; padding."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from tests.tiny import ids_of, relative, target_config, target_tensors, write_target

CASES = ["llama_gqa", "llama_tied", "llama3_rope", "llama3_rope_legacy", "llama_linear_rope"]
LAYERS = 8


@pytest.mark.parametrize("case", CASES)
def test_forward_equals_hugging_face(golden, case: str) -> None:
    folder = golden(f"targets/{case}")
    expected = load_file(folder / "expected.safetensors")
    target = e3.load_target(folder, dtype="float32")
    given, greedy = expected["input_ids"], expected["greedy_ids"]
    # What follows the given tokens changes nothing of theirs.
    out = target.forward(np.concatenate([given, greedy[:, :-1]], axis=1), taps=range(LAYERS + 1))
    assert out.logits.dtype == np.float32
    logits, last, *taps = (np.asarray(a)[:, : given.shape[1]] for a in (out.logits, out.last_hidden, *out.taps.arrays))
    assert relative(logits, expected["logits"]) < 1e-4
    for k in range(LAYERS):
        assert relative(taps[k], expected[f"hidden.{k}"]) < 1e-4, f"tap {k}"
    # Hugging Face's hidden_states[N] is after the final norm, our tap N is before it
    assert relative(taps[LAYERS], expected["pre_norm_last"]) < 1e-4
    assert relative(last, expected["pre_norm_last"]) < 1e-4
    assert relative(last, expected[f"hidden.{LAYERS}"]) > 0.1
    np.testing.assert_array_equal(np.argmax(out.logits[:, -greedy.shape[1] :], axis=-1), greedy)


def test_plain_text_is_hugging_faces_greedy_text(golden) -> None:
    folder = golden("targets/llama_gqa")
    expected = load_file(folder / "expected.safetensors")
    prompts, greedy = expected["input_ids"].tolist(), expected["greedy_ids"].tolist()
    answers = e3.generate(e3.load_target(folder, "float32"), None, prompts, len(greedy[0]), stop_token_ids=())
    assert [answer.tokens for answer in answers] == greedy


def test_old_and_new_rope_keys_mean_the_same(golden) -> None:
    new, old = (e3.load_target(golden(f"targets/llama3_rope{end}"), "float32") for end in ("", "_legacy"))
    assert new.config == old.config and new.config.rope.kind == "llama3"


def numpy_llama(config: dict, w: dict[str, np.ndarray], ids: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """A decoder of one sequence in float64 loops: logits [T, V] and the residual stream at every block input."""
    w = {name: array.astype(np.float64) for name, array in w.items()}
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    theta = config["rope_parameters"]["rope_theta"]

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotated(x):  # [T, heads, dim], pairs (i, i + dim/2)
        out = np.empty_like(x)
        for t in range(len(x)):
            for i in range(dim // 2):
                angle = t * theta ** (-2 * i / dim)
                a, b = x[t, :, i], x[t, :, i + dim // 2]
                out[t, :, i] = a * np.cos(angle) - b * np.sin(angle)
                out[t, :, i + dim // 2] = b * np.cos(angle) + a * np.sin(angle)
        return out

    x, stream = w["model.embed_tokens.weight"][ids], []
    for layer in range(config["num_hidden_layers"]):
        stream.append(x)
        prefix = f"model.layers.{layer}"
        h = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (linear(h, f"{prefix}.self_attn.{n}_proj").reshape(len(ids), -1, dim) for n in "qkv")
        q, k = rotated(q), rotated(k)
        attended = np.zeros((len(ids), heads, dim))
        for t in range(len(ids)):
            for head in range(heads):
                group = head // (heads // kv)
                scores = k[: t + 1, group] @ q[t, head] / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                attended[t, head] = weights / weights.sum() @ v[: t + 1, group]
        x = x + linear(attended.reshape(len(ids), -1), f"{prefix}.self_attn.o_proj")
        h = norm(x, f"{prefix}.post_attention_layernorm")
        gate = linear(h, f"{prefix}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj")
    stream.append(x)
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return norm(x, "model.norm") @ w[f"{head}.weight"].T, stream


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-2},
    ],
    ids=["biases", "tied", "one kv head"],
)
def test_forward_equals_a_numpy_decoder(tmp_path: Path, changes: dict) -> None:
    changes = {"num_hidden_layers": 2, "vocab_size": 40} | changes
    config = target_config(**changes)
    tensors = target_tensors(config, seed=3)
    assert any("bias" in name for name in tensors) == bool(config.get("attention_bias"))
    target = e3.load_target(write_target(tmp_path / "t", tensors=tensors, **changes), dtype="float32")
    ids = ids_of(1, 7, vocab_size=40)
    logits, stream = numpy_llama(config, tensors, ids)
    out = target.forward(ids[None], taps=[0, 1, 2])
    assert relative(out.logits[0], logits) < 1e-5
    for got, expected in zip(out.taps.arrays, stream, strict=True):
        assert relative(got[0], expected) < 1e-5


def test_taps_come_in_the_order_asked_for(tiny_target) -> None:
    ids = ids_of(0, 2, 16)
    every = tiny_target.forward(ids, taps=range(9)).taps.arrays
    taps = [8, 2, 0, 6]
    out = tiny_target.forward(ids, taps=taps)
    assert list(out.taps.tap_set) == taps
    for point, array in zip(taps, out.taps.arrays, strict=True):
        np.testing.assert_allclose(array, every[point], rtol=1e-5, atol=1e-5)


def test_padding_changes_no_real_token(shallow_target) -> None:
    ids = ids_of(2, 2, 16)
    lengths = [5, 1]
    padded = ids.copy()
    for row, length in zip(padded, lengths, strict=True):
        row[length:] = 0
    full = shallow_target.forward(ids, taps=[0, 1, 2])
    cut = shallow_target.forward(padded, taps=[0, 1, 2], lengths=lengths)
    for i, length in enumerate(lengths):
        for a, b in ((full.logits, cut.logits), (full.last_hidden, cut.last_hidden)):
            np.testing.assert_allclose(a[i, :length], b[i, :length], rtol=1e-5, atol=1e-5)
        for a, b in zip(full.taps.arrays, cut.taps.arrays, strict=True):
            np.testing.assert_allclose(a[i, :length], b[i, :length], rtol=1e-5, atol=1e-5)
    assert np.isfinite(cut.logits).all()


def split_in_two(folder: Path, out: Path) -> Path:
    """The same model in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    out.mkdir()
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    names, files = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, out / file)
    index = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return out


def test_a_sharded_folder_is_the_same_model(tmp_path: Path, tiny_folder: Path, tiny_target) -> None:
    sharded = e3.load_target(split_in_two(tiny_folder, tmp_path / "sharded"), dtype="float32")
    ids = ids_of(0, 2, 16)
    np.testing.assert_array_equal(
        sharded.forward(ids, taps=[2, 4, 6]).logits, tiny_target.forward(ids, taps=[2, 4, 6]).logits
    )


def test_a_tied_model_may_store_its_head_but_no_other_one(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 1, "vocab_size": 40, "tie_word_embeddings": True}
    tensors = target_tensors(target_config(**changes))
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"]
    folder = write_target(tmp_path / "its own", tensors=tensors | {"lm_head.weight": head}, **changes)
    assert "lm_head" not in e3.load_target(folder).params
    folder = write_target(tmp_path / "another", tensors=tensors | {"lm_head.weight": head * 2}, **changes)
    refused(folder, "tie_word_embeddings is on, given or by default, but lm_head.weight is another matrix")


def test_dtypes(tmp_path: Path) -> None:
    half = e3.load_target(write_target(tmp_path / "t", num_hidden_layers=1))
    assert half.dtype == "bfloat16" and half.params["model"]["norm"]["weight"].dtype == "bfloat16"
    out = half.forward(ids_of(0, 2, 16), taps=[1])
    assert out.last_hidden.dtype == "bfloat16"
    assert out.logits.dtype == np.float32 and out.taps.arrays[0].dtype == "bfloat16"


def test_facts_of_a_loaded_target(tmp_path: Path, tiny_target, monkeypatch) -> None:
    assert (tiny_target.num_layers, tiny_target.eos_token_ids, tiny_target.tokenizer) == (8, (2,), None)
    with pytest.raises(e3.UserError, match="no tokenizer"):
        tiny_target.require_tokenizer()
    folder = write_target(tmp_path / "t", num_hidden_layers=1, eos_token_id=[2, 5, 512, -1])  # of 512 tokens
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    with monkeypatch.context() as patch:  # a tokenizer that ends chats with a token of its own
        patch.setattr("eagle3_jax.models.target._folder_tokenizer", lambda _: SimpleNamespace(eos_token_id=9))
        assert e3.load_target(folder).eos_token_ids == (7, 2, 5, 9)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(e3.UserError, match=r"eos_token_id in generation_config.json is \['</s>'\] / .* a token id"):
        e3.load_target(folder)


def test_ids_lengths_and_dtypes_that_mean_nothing_are_refused(tiny_folder: Path, tiny_target, untyped) -> None:
    ids = ids_of(0, 2, 4)
    for wrong in ([4], [5, 1], [-1, 4], [4.0, 2.0], 4):
        with pytest.raises(e3.UserError, match=r"give 2 integers in 0\.\.4"):
            tiny_target.forward(ids, lengths=wrong)
    for wrong, message in ((ids + 0.5, "are float64"), ([[3, 4], [5]], "differ in length / pad them")):
        with pytest.raises(e3.UserError, match=message):
            tiny_target.forward(wrong)
    for wrong in ("bf16", "float64", "int8", None):
        with pytest.raises(e3.UserError, match="give one of float32, float16, bfloat16"):
            e3.load_target(tiny_folder, dtype=wrong)


# --- loading: anything but a complete, fitting model is refused in one line


def refused(folder: Path, match: str) -> None:
    with pytest.raises(e3.UserError, match=match) as caught:
        e3.load_target(folder)
    assert "\n" not in str(caught.value)


SMALL = {"num_hidden_layers": 1, "vocab_size": 40}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_target(tmp_path / "small", **SMALL)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor_is_named(small: Path) -> None:
    rewrite(small, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))
    refused(small, r"missing: model\.layers\.0\.mlp\.up_proj\.weight")


def test_an_extra_tensor_is_named(small: Path) -> None:
    rewrite(small, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.zeros((96, 64), np.float32)}))
    refused(small, r"not used: model\.layers\.1\.mlp\.up_proj\.weight")


def test_missing_and_extra_are_listed_together(small: Path) -> None:
    rewrite(small, lambda t: t.update({"model.norm.wieght": t.pop("model.norm.weight")}))
    refused(small, r"missing: model\.norm\.weight; not used: model\.norm\.wieght")


def test_biases_that_the_config_does_not_name_are_refused(small: Path) -> None:
    rewrite(small, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(128, np.float32)}))
    refused(small, r"not used: model\.layers\.0\.self_attn\.q_proj\.bias")


def test_a_wrong_shape_is_told_with_both_shapes(small: Path) -> None:
    rewrite(small, lambda t: t.update({"model.norm.weight": np.zeros(63, np.float32)}))
    refused(small, r"model\.norm\.weight has shape \[63\], the config says \[64\]")


def test_a_torn_file_is_refused(small: Path) -> None:
    file = small / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(small, r"cannot read weights / .*model\.safetensors / .*torn")


def test_an_empty_file_is_refused(small: Path) -> None:
    (small / "model.safetensors").write_bytes(b"")
    refused(small, "cannot read weights")


def test_a_missing_shard_is_named(small: Path, tmp_path: Path) -> None:
    folder = split_in_two(small, tmp_path / "sharded")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"lacks the weight file\(s\) model-00002-of-00002\.safetensors")


def test_a_folder_without_config_is_refused(small: Path) -> None:
    (small / "config.json").unlink()
    refused(small, r"cannot read config\.json / .*config\.json")


def test_a_broken_config_is_refused(small: Path) -> None:
    (small / "config.json").write_text('{"architectures": [')
    refused(small, r"not valid JSON / .*config\.json")


def test_a_folder_without_weights_is_refused(small: Path) -> None:
    (small / "model.safetensors").unlink()
    refused(small, r"no \*\.safetensors file")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t", tensors={"x": np.zeros(1)}, architectures=["BertModel"])
    refused(folder, "BertModel is not supported .* supported: .*LlamaForCausalLM")


def test_no_such_path_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such model")

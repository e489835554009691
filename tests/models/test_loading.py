"""Loading: memory while a model in shards is read, quantised checkpoints, and what is refused by name."""

import gc
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax.models.quantised import dequantised
from eagle3_jax.models.weights import TensorFiles
from tests.tiny import target_config, target_tensors, write_target

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "targets"


# --- memory


def memory(field: str) -> int:
    """Bytes of VmRSS or VmHWM (the most since it was reset)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def write_shards(folder: Path) -> int:
    """A mixture of experts in three float32 shards of one layer each; returns the size of a shard."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 256, "moe_intermediate_size": 512}
    raw = target_config(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=16,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
        **sizes,
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    ends = {"model.embed_tokens.weight": (256, 256), "model.norm.weight": (256,)}
    block = {"input_layernorm": (256,), "post_attention_layernorm": (256,), "mlp.gate": (16, 256)}
    block |= {"self_attn.q_proj": (128, 256), "self_attn.k_proj": (64, 256), "self_attn.v_proj": (64, 256)}
    block |= {"self_attn.o_proj": (256, 128), "self_attn.q_norm": (32,), "self_attn.k_norm": (32,)}
    for expert in range(16):
        block |= {f"mlp.experts.{expert}.{part}_proj": (512, 256) for part in ("gate", "up")}
        block[f"mlp.experts.{expert}.down_proj"] = (256, 512)
    for layer in range(3):
        shapes = {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
        shapes |= ends if layer == 0 else {}
        file = folder / f"model-{layer}.safetensors"
        save_file({name: np.full(shape, layer, np.float32) for name, shape in shapes.items()}, file)
    return file.stat().st_size


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc to read the memory from")
def test_a_model_in_shards_needs_less_than_one_shard_beside_itself(tmp_path: Path) -> None:
    shard = write_shards(tmp_path / "m")
    e3.load_target(tmp_path / "m")  # once before: code, compiled programs and the allocator's arenas stay
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    target = e3.load_target(tmp_path / "m")
    own = sum(array.nbytes for array in jax.tree.leaves(target.params))
    assert own > 1.4 * shard  # three shards in bfloat16
    assert memory("VmHWM") - before - own < 1.1 * shard
    assert float(target.params["model"]["layers"][2]["mlp"]["experts"]["up_proj"]["weight"][15, 0, 0]) == 2


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "m")
    file = tmp_path / "m" / "model-1.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(e3.UserError, match=r"missing: model\.layers\.1\.mlp\.experts\.up_proj\.weight\[3\]"):
        e3.load_target(tmp_path / "m")


# --- quantised checkpoints


def dense(folder: Path, facts: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    save_file(tensors, folder / "q.safetensors")
    files = TensorFiles([folder / "q.safetensors"])
    return {name: np.asarray(array, np.float32) for name, array, *_ in dequantised(facts, files, "here")}


def compressed(kind: str, bits: int) -> dict:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"g": {"weights": {"num_bits": bits}}},
    }


def test_fp8_with_scales_of_blocks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((5, 7)).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(1, 2, (2, 3)).astype(np.float32)
    stored = {"a.weight": codes, "a.weight_scale_inv": scales, "b.weight": np.ones(3, np.float32)}
    got = dense(tmp_path, {"quant_method": "fp8", "weight_block_size": [4, 3]}, stored)
    assert got.keys() == {"a.weight", "b.weight"}
    for i, j in np.ndindex(5, 7):
        assert got["a.weight"][i, j] == np.float32(codes[i, j]) * scales[i // 4, j // 3]


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        (compressed("float-quantized", 8), {"weight_scale": [[2.0], [3.0]]}, [[2, 4], [-9, 0]]),
        (compressed("int-quantized", 8), {"weight_scale": [0.5]}, [[0.5, 1], [-1.5, 0]]),
        (
            compressed("int-quantized", 8),
            {"weight_scale": [[1.0], [2.0]], "weight_zero_point": [[1.0], [-1.0]]},
            [[0, 1], [-4, 2]],
        ),
        ({"quant_method": "fbgemm_fp8"}, {"weight_scale": [[2.0], [3.0]], "input_scale": [9.0]}, [[2, 4], [-9, 0]]),
        ({"quant_method": "fp8"}, {"weight_scale_inv": 2.0, "activation_scale": 9.0}, [[2, 4], [-6, 0]]),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"SCB": [127.0, 254.0]}, [[1, 2], [-6, 0]]),
    ],
)
def test_scales_of_rows_and_of_whole_matrices(tmp_path: Path, config: dict, stored: dict, expected: list) -> None:
    codes = np.array([[1, 2], [-3, 0]])
    codes = codes.astype(np.int8 if "SCB" in stored or config.get("format") == "int-quantized" else jnp.float8_e4m3fn)
    beside = {f"a.{name}": np.array(value, np.float32) for name, value in stored.items()}
    got = dense(tmp_path, config, {"a.weight": codes} | beside)
    assert got.keys() == {"a.weight"}
    np.testing.assert_allclose(got["a.weight"], expected, rtol=1e-6)


def test_mxfp4_experts_are_those_of_the_unquantised_model(tmp_path: Path) -> None:
    """The tiny gpt-oss with its kernels rounded to MXFP4, stored both ways."""
    rng, names = np.random.default_rng(0), ("gate_up_proj", "down_proj")
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    raw = json.loads((GOLDEN / "gpt_oss_tiny" / "config.json").read_text())
    raw |= {"intermediate_size": 32, "num_hidden_layers": 1, "layer_types": None}
    plain = {k: v for k, v in load_file(GOLDEN / "gpt_oss_tiny" / "model.safetensors").items() if ".1." not in k}
    plain = {name: array for name, array in plain.items() if ".layers.2." not in name and ".experts." not in name}
    packed, prefix = dict(plain), "model.layers.0.mlp.experts"
    for name, (outputs, inputs) in zip(names, ((64, 32), (32, 32)), strict=True):
        codes, scales = rng.integers(0, 16, (4, outputs, 1, 32)), rng.integers(120, 126, (4, outputs, 1))
        values = table[codes & 7] * np.where(codes > 7, -1, 1) * 2.0 ** (scales[..., None] - 127)
        plain[f"{prefix}.{name}"] = values.reshape(4, outputs, inputs).swapaxes(1, 2).astype(np.float32)
        packed[f"{prefix}.{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
        packed[f"{prefix}.{name}_scales"] = scales.astype(np.uint8)
        for tensors in (plain, packed):
            tensors[f"{prefix}.{name}_bias"] = np.zeros((4, outputs), np.float32)
    quantised = raw | {"quantization_config": {"quant_method": "mxfp4"}}
    loaded = []
    for folder, config, tensors in (("plain", raw, plain), ("packed", quantised, packed)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / folder / "model.safetensors")
        loaded.append(e3.load_target(tmp_path / folder, "float32").params)
    jax.tree.map(np.testing.assert_array_equal, *loaded)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes, 4 bit'"),
        (compressed("pack-quantized", 4), "'compressed-tensors, format pack-quantized'"),
        (compressed("float-quantized", 4), "'compressed-tensors, format float-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt, NVFP4'"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}}, "'modelopt, W4A8_AWQ'"),
        ({"load_in_4bit": True}, "'bitsandbytes, 4 bit'"),
        (compressed("int-quantized", 8) | {"config_groups": ["x"]}, "'compressed-tensors, format int-quantized'"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, config: dict, name: str) -> None:
    folder = write_target(tmp_path / "t", tensors={"x": np.zeros(1)}, quantization_config=config)
    assert_refused(folder, name)


def assert_refused(folder: Path, name: str) -> None:
    with pytest.raises(e3.UserError, match=f"quantised with {name} cannot be read / .* / use an unquantised") as caught:
        e3.load_target(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "'gptq'"),
        ("quant_config.json", {"w_bit": 4, "zero_point": True}, "'awq'"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "'modelopt, NVFP4'"),
    ],
)
def test_quantisations_that_only_a_file_beside_states(tmp_path: Path, file: str, content: dict, name: str) -> None:
    folder = write_target(tmp_path / "t", tensors={"x": np.zeros(1)})
    (folder / file).write_text(json.dumps(content))
    assert_refused(folder, name)


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        (("qweight", "qzeros", "scales"), "'awq or gptq'"),
        (("qweight", "qzeros", "scales", "g_idx"), "'gptq'"),
        (("weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"), "'bitsandbytes, 4 bit'"),
        (("weight_packed", "weight_scale", "weight_shape"), "'compressed-tensors, packed'"),
    ],
)
def test_quantisations_that_nothing_states_are_known_by_their_tensors(tmp_path: Path, tensors, name: str) -> None:
    stored = {f"model.layers.0.self_attn.q_proj.{leaf}": np.zeros(1, np.int32) for leaf in tensors}
    assert_refused(write_target(tmp_path / "t", tensors=stored), name)


def test_caches_that_are_to_be_quantised_are_no_quantised_weights(tmp_path: Path) -> None:
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    tensors = target_tensors(target_config(num_hidden_layers=1))
    folder = write_target(tmp_path / "t", tensors=tensors, num_hidden_layers=1, quantization_config=config)
    assert e3.load_target(folder).num_layers == 1


def test_bytes_without_a_scale_are_no_weights(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "t", tensors={"model.norm.weight": np.zeros(64, np.int8)})
    with pytest.raises(e3.UserError, match=r"model\.norm\.weight is int8 and has no scale beside it"):
        e3.load_target(folder)


# --- families


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
        ("mistral", {"sliding_window": 0.5}, "sliding_window 0.5"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "sliding_window 5 and layer_types that differ"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping '50'"),
        ("gemma3", {"sliding_window_pattern": None}, "sliding_window_pattern None"),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "default"}},
            "one rotation in rope_parameters / give one for each",
        ),
        ("gemma3", {"hidden_activation": None}, "hidden_activation None"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers \[1, 0\]"),
        ("smollm3", {"use_sliding_window": False}, "sliding_window 6, which is switched off / correct layer_types"),
        ("phi3", {"original_max_position_embeddings": 16}, "original_max_position_embeddings 16 and inside"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok None"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ("deepseek", {"scoring_func": "softmax"}, "scoring_func 'softmax' / only 'sigmoid'"),
        ("deepseek", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek", {"n_group": 3}, "8 experts do not divide into 3 groups"),
        ("deepseek", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ("deepseek", {"num_experts_per_tok": 9}, "through 9 of 8 experts in 2 of 4 groups"),
        ("deepseek", {"topk_group": 5}, "experts in 5 of 4 groups"),
        ("deepseek", {"routed_scaling_factor": None}, "routed_scaling_factor None"),
        ("deepseek", {"first_k_dense_replace": "1"}, "first_k_dense_replace '1'"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar None"),
        ("qwen2", {"max_window_layers": None, "layer_types": None}, "max_window_layers None"),
        (
            "olmo3",
            {"rope_theta": 1e4, "rope_parameters": None},
            "rope_theta 10000.0, which transformers 4 takes for all",
        ),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("phi3", {"partial_rotary_factor": 0.1, "rope_parameters": None}, "rotates 0 of 8 dimensions"),
        ("llama", {"hidden_act": "mish"}, "hidden_act 'mish'"),
        ("llama", {"layer_types": 1}, "layer_types 1"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers 1"),
        ("deepseek", {"rope_interleave": "false"}, "rope_interleave 'false'"),
    ],
)
def test_options_that_are_not_computed_are_refused_by_key(
    tmp_path: Path, case: str, changes: dict, message: str
) -> None:
    raw = json.loads((GOLDEN / f"{case}_tiny" / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(e3.UserError, match=message) as caught:
        e3.load_target(tmp_path)
    assert "\n" not in str(caught.value)

"""config.json of a decoder: what is read, what is refused, what is warned about."""

import json
from pathlib import Path

import pytest

from eagle3_jax.errors import UserError
from eagle3_jax.models.config import decoder_config, decoder_config_to_hf
from eagle3_jax.models.families import family_of
from tests.tiny import target_config

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "targets"


def test_sizes_are_read() -> None:
    config = decoder_config(target_config())
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 2, 32)
    assert (config.max_positions, config.rms_norm_eps, config.rope.theta) == (128, 1e-5, 500000.0)
    assert config.facts == {
        "hidden_size": 64,
        "num_layers": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 512,
    }


def test_derived_sizes() -> None:
    raw = target_config()
    del raw["head_dim"], raw["num_key_value_heads"]
    config = decoder_config(raw)
    assert config.head_dim == 16 and config.num_kv_heads == 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"model_type": "qwen3"},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 4},
        {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 6},
    ],
)
def test_writing_and_reading_are_inverse(changes: dict) -> None:
    config = decoder_config(target_config(**changes))
    assert decoder_config(decoder_config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": "512"}, "lacks vocab_size"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
        ({"sliding_window": 8}, "sliding_window 8 but no layer_types"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "1 layer_types for 8 layers"),
        ({"sliding_window": 8, "layer_types": ["chunked_attention"] * 8}, "layer_types .'chunked_attention'."),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_attention layers but sliding_window None"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"hidden_size": 66, "head_dim": None}, "no multiple of num_attention_heads"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        decoder_config(target_config(**changes), "here/config.json")
    assert str(caught.value).startswith("here/config.json") and "\n" not in str(caught.value)


def test_a_window_that_is_switched_off_is_accepted() -> None:
    assert decoder_config(target_config(sliding_window=8, use_sliding_window=False)).max_positions == 128


def test_qwen_windows_begin_at_max_window_layers() -> None:
    config = decoder_config(
        target_config(model_type="qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=6)
    )
    assert config.windows == (None,) * 6 + (8,) * 2
    assert decoder_config(target_config(model_type="qwen3", sliding_window=8, use_sliding_window=False)).windows == ()


def test_unknown_keys_are_named_in_a_warning() -> None:
    with pytest.warns(UserWarning, match="ignored: logit_softcap, zeta"):
        decoder_config(target_config(zeta=1, logit_softcap=30.0, unset=None))


def test_unknown_keys_of_a_draft_are_refused() -> None:
    with pytest.raises(UserError, match="not understood: logit_softcap"):
        decoder_config(target_config(logit_softcap=30.0), strict=True)


@pytest.mark.parametrize(
    ("architecture", "changes", "facts"),
    [
        ("Phi3ForCausalLM", {}, {"rms_norm_eps": 1e-5, "max_positions": 4096}),
        ("MixtralForCausalLM", {"num_attention_heads": 8}, {"rms_norm_eps": 1e-5, "max_positions": 131072}),
        ("MistralForCausalLM", {"num_attention_heads": 8}, {"num_kv_heads": 8, "windows": (4096, 4096)}),
        (
            "MistralForCausalLM",
            {"num_key_value_heads": None, "sliding_window": None},
            {"num_kv_heads": 4, "windows": ()},
        ),
        ("Qwen3ForCausalLM", {"num_key_value_heads": 2}, {"head_dim": 128, "max_positions": 32768, "windows": ()}),
        ("Gemma2ForCausalLM", {}, {"tie_embeddings": True, "logit_softcap": 30.0, "attention_softcap": 50.0}),
        ("Gemma3ForCausalLM", {}, {"tie_embeddings": True, "query_scale": 1 / 16, "windows": (4096, 4096)}),
        ("SmolLM3ForCausalLM", {}, {"tie_embeddings": True, "windows": ()}),
        ("Olmo3ForCausalLM", {}, {"rms_norm_eps": 1e-5, "tie_embeddings": False, "windows": (4096, 4096)}),
    ],
)
def test_an_absent_key_means_what_transformers_takes_for_it(architecture: str, changes: dict, facts: dict) -> None:
    raw = {"architectures": [architecture], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 4} | changes
    config = family_of(raw, "here").read(raw, "here")
    assert {key: getattr(config, key) for key in facts} == facts


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama_gqa", {"sliding_window": 8}, "sliding_window 8 / .* full attention only"),
        ("olmo2_tiny", {"layer_types": ["chunked_attention"] * 2}, r"layer_types \['chunked_attention'\] / "),
        ("deepseek_tiny", {"sliding_window": 8}, "full attention only"),
        ("llama_gqa", {"final_logit_softcapping": 30.0, "clip_qkv": 1}, "final_logit_softcapping 30.0, which"),
        ("qwen3_tiny", {"use_qk_norm": True}, "use_qk_norm True, which"),
    ],
)
def test_what_only_other_families_compute_is_refused(case: str, changes: dict, message: str) -> None:
    raw = json.loads((GOLDEN / case / "config.json").read_text()) | changes
    with pytest.raises(UserError, match=message):
        family_of(raw, "here").read(raw, "here")


def test_the_base_of_a_rotation_that_is_scaled_by_default_can_be_stated() -> None:
    raw = json.loads((GOLDEN / "gpt_oss_tiny" / "config.json").read_text()) | {"rope_theta": 5000.0}
    rope = family_of(raw, "here").read(raw | {"rope_parameters": None}, "here").rope
    assert (rope.kind, rope.theta, rope.get("factor")) == ("yarn", 5000.0, 32.0)

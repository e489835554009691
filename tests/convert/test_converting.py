"""`python -m convert`: bit-equal round trips, ids for SGLang, refusals that name what a destination cannot say."""

import dataclasses
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import eagle3_jax as e3
from convert import sglang
from convert.target import TargetFacts
from eagle3_jax.cli.convert import _named
from eagle3_jax.cli.main import main
from tests.convert.folders import write
from tests.tiny import random_draft

DESTINATIONS = ["speculators", "sglang", "safeailab", "modelopt"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def run(capfd) -> Callable[..., tuple[int, str, str]]:
    def command(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture
def convert(run) -> Callable[..., None]:
    def command(source: Path, destination: Path, to: str, *more: object) -> None:
        code, _, err = run("convert", source, destination, "--to", to, *more)
        assert code == 0, err

    return command


@pytest.fixture
def refused(run) -> Callable[..., str]:
    """The one line of a conversion that must fail, after checking that nothing was written."""

    def command(source: Path, destination: Path, to: str, *more: object) -> str:
        code, out, err = run("convert", source, destination, "--to", to, *more)
        assert (code, out) == (2, "") and err.count("\n") == 1, err
        assert not destination.exists() and not list(destination.parent.glob(".*"))
        return err

    return command


def saved(folder: Path, draft: e3.Draft) -> Path:
    e3.save_draft(draft, folder)
    return folder


def same_files(a: Path, b: Path) -> None:
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype
        np.testing.assert_array_equal(array, right[name], err_msg=name)
    assert json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())


VARIANTS = {  # what each destination can say
    "speculators": {
        "everything": {
            "taps": (6, 0, 4, 8),
            "layers": 2,
            "layer": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
        },
        "Qwen3": {"layer": {"model_type": "qwen3", "attention_bias": True}, "d2t": np.arange(512)},
    },
    "sglang": {
        "EAGLE-3.1": {"taps": (2, 3, 5, 7), "fc_norm": True, "norm_output": True, "layers": 2},
        "last state": {"taps": (8,), "use_aux_hidden_state": False, "fc_bias": True},
        "llama3 rope": {"layer": {"rope_parameters": LLAMA3, "head_dim": 32}},
    },
    "safeailab": {
        "full": {"taps": (2, 4, 5), "d2t": np.arange(512)},
        "linear rope": {
            "taps": (2, 4, 5),
            "layer": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        },
    },
    "modelopt": {
        "unsorted": {"d2t": np.random.default_rng(0).permutation(np.arange(0, 512, 4))},
        "bias": {"layer": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}},
    },
}
CASES = [(to, name) for to, variants in VARIANTS.items() for name in variants]


@pytest.mark.parametrize(("to", "variant"), CASES)
def test_there_and_back_is_bit_equal(tmp_path: Path, tiny_target, convert, to: str, variant: str) -> None:
    draft = random_draft(tiny_target, **VARIANTS[to][variant])
    draft = draft.with_params(jax.tree.map(lambda a: a.astype(jnp.bfloat16), draft.params))
    facts = {**draft.facts, "verifier": {"name_or_path": "org/t", "architectures": ["X"]}, "speculative_tokens": 5}
    source = saved(tmp_path / "source", e3.Draft(draft.config, draft.graph, draft.params, draft.d2t, facts))
    convert(source, tmp_path / "there", to)
    # SafeAILab's files have no ids but ours name them in their own block, so nothing has to be said.
    loaded = e3.load_draft(tmp_path / "there")
    assert loaded.config == draft.config
    e3.save_draft(loaded, tmp_path / "back")
    same_files(source, tmp_path / "back")


@pytest.mark.parametrize("layout", DESTINATIONS)
def test_a_foreign_draft_comes_back_bit_equal(tmp_path: Path, tiny_target, convert, layout: str) -> None:
    draft = random_draft(tiny_target, taps=(2, 4, 5))
    inner = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    source = write(tmp_path / "source", draft, layout, eagle_config=inner, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    middle = "sglang" if layout == "speculators" else "speculators"
    convert(source, tmp_path / "middle", middle)
    convert(tmp_path / "middle", tmp_path / "back", layout)
    before, after = (load_file(place / "model.safetensors") for place in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
    if layout == "speculators":
        written = json.loads((tmp_path / "back" / "config.json").read_text())["speculators_config"]
        assert written["verifier"]["name_or_path"] == "org/target"
        assert written["proposal_methods"][0]["speculative_tokens"] == 5


@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_the_rotation_of_images_is_kept_and_is_plain_for_text(
    tmp_path: Path, tiny_draft, convert, refused, kind
) -> None:
    """Drafts of Qwen-VL: transformers writes both names for it."""
    scaling = {"rope_type": kind, "type": kind, "mrope_section": [2, 3, 3]}
    source = write(tmp_path / "source", tiny_draft, "sglang", rope_scaling=scaling)
    assert "mrope_section" in refused(source, tmp_path / "no", "safeailab")
    convert(source, tmp_path / "middle", "speculators")
    convert(tmp_path / "middle", tmp_path / "back", "sglang")
    middle, back = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("middle", "back"))
    assert middle["transformer_layer_config"]["rope_parameters"]["mrope_section"] == [2, 3, 3]
    assert back["rope_scaling"] == {"rope_type": "default", "mrope_section": [2, 3, 3]}


def test_the_golden_research_draft_converts_as_the_library_does(tmp_path: Path, golden, convert) -> None:
    convert(golden("convert/safeailab_bin"), tmp_path / "out", "speculators", "--taps", "2,4,5")
    ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path / "out", golden("convert/out_flags")))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["norm_before_residual"] is False  # stated, since readers differ in what an absent key means
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and raw["dtype"] == "float16"


# --- SGLang's ids


def test_names_and_keys_that_the_servers_look_up(tmp_path: Path, tiny_draft, convert) -> None:
    convert(saved(tmp_path / "s", tiny_draft), tmp_path / "d", "sglang")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    layer = [name for name in tensors if name.startswith("midlayer.")]
    assert len(layer) == 10 and not any("layers." in name.replace("midlayer.", "") for name in tensors)
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} < tensors.keys()
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["model_type"] == "llama"
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]  # for vLLM, which looks here
    assert "target_hidden_size" not in raw  # null would be multiplied
    assert "norm_output" not in raw and raw["rope_theta"] == 500000.0 and raw["rope_scaling"] is None


# What the loaders of sglang-jax (python/sgl_jax/srt/models/llama_eagle3.py) and tpu-inference
# (tpu_inference/models/jax/llama_eagle3.py) look up, by exact name. Published drafts hold t2d
# besides; both servers take the target's embedding.
JAX_SERVERS = {"d2t", "fc.weight", "lm_head.weight", "norm.weight"} | {
    f"midlayer.{name}.weight"
    for name in (
        *("input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"),
        *("mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    )
}


def test_the_jax_servers_find_every_tensor_they_look_up(tmp_path: Path, tiny_draft, convert) -> None:
    convert(saved(tmp_path / "s", tiny_draft), tmp_path / "d", "sglang")
    assert load_file(tmp_path / "d" / "model.safetensors").keys() - {"embed_tokens.weight", "t2d"} == JAX_SERVERS
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    # Both build fc for three taps and one layer, from these keys of a LlamaConfig.
    assert raw["num_hidden_layers"] == 1 and raw["tie_word_embeddings"] is False
    assert {"hidden_size", "vocab_size", "draft_vocab_size", "rms_norm_eps", "intermediate_size"} <= raw.keys()


@pytest.mark.parametrize(
    ("taps", "rule", "ids"),
    [
        ([2, 15, 27], None, [1, 14, 26]),
        ([2, 15, 27], "always", [1, 14, 26]),
        ([2, 15, 27], "first-is-1", [1, 14, 26]),
        ([3, 15, 27], "always", [2, 14, 26]),
        ([3, 15, 27], "first-is-1", [3, 15, 27]),
        ([1, 15, 27], "always", [0, 14, 26]),
    ],
)
def test_ids_under_both_rules(taps: list[int], rule: str | None, ids: list[int]) -> None:
    assert sglang.layer_ids(e3.TapSet(taps), rule) == ids

    def captured(first_is_1: bool) -> list[int]:
        """What the server captures: block inputs, after its rule."""
        return [i + 1 for i in ids] if not first_is_1 or ids[0] == 1 else ids

    assert captured(rule == "first-is-1") == taps
    if rule is None:
        assert captured(True) == captured(False)


@pytest.mark.parametrize(
    ("taps", "rule", "message"),
    [
        ([3, 15, 27], None, r"older SGLang.*\[2, 14, 26\].*newer.*\[3, 15, 27\].*--sglang-rule always or first-is-1"),
        ([1, 15, 27], "first-is-1", r"would read ids \[1, 15, 27\] as \[2, 16, 28\]"),
        ([0, 3, 31], None, "cannot capture the embedding"),
        ([0, 3, 31], "always", "cannot capture the embedding"),
        ([2, 27, 15], "always", "ascending order"),
    ],
)
def test_taps_that_sglang_cannot_be_told(taps: list[int], rule: str | None, message: str) -> None:
    with pytest.raises(e3.UserError, match=message):
        sglang.layer_ids(e3.TapSet(taps), rule)


# --- refusals

REFUSALS = {
    "sglang": [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"layer": {"attention_bias": True}}, "attention_bias"),
        ({"layer": {"mlp_bias": True}}, "mlp_bias"),
        ({"layer": {"model_type": "qwen3"}}, "q_norm/k_norm"),
        ({"layer": {"sliding_window": 5, "layer_types": ["sliding_attention"]}}, "sliding_window"),
        ({"taps": (0, 3, 6)}, "cannot capture the embedding"),
        ({"taps": (3, 5, 7)}, "--sglang-rule"),
    ],
    "safeailab": [
        ({"taps": (2, 4, 5), "norm_before_residual": True}, "norm_before_residual"),
        ({"taps": (2, 4, 5), "norm_output": True, "fc_norm": True}, "fc_norm, norm_output"),
        ({"taps": (2, 4, 5), "layers": 2}, "num_hidden_layers 2"),
        ({"taps": (2, 4, 5), "layer": {"head_dim": 32}}, "head_dim 32"),
        ({"taps": (2, 4, 5), "layer": {"rope_parameters": LLAMA3}}, "rope type llama3"),
        ({"taps": (2, 3, 7)}, r"taps \[2, 3, 7\] \(it reads 2, N//2 and N-3\)"),
        ({"taps": (2, 5, 7)}, r"taps \[2, 5, 7\] on 8 blocks \(it reads \[2, 4, 5\]\)"),
    ],
    "speculators": [
        ({"fc_bias": True}, r"bias \(of fc\)"),
        ({"taps": (8,), "use_aux_hidden_state": False}, "use_aux_hidden_state false"),
    ],
    "modelopt": [
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"taps": (0, 3, 6)}, "hold the embedding"),
        ({"taps": (4, 2, 6)}, r"ModelOpt captures taps in ascending order, and the draft reads \[4, 2, 6\]"),
    ],
}


@pytest.mark.parametrize(
    ("to", "options", "message"), [(to, *case) for to, cases in REFUSALS.items() for case in cases]
)
def test_what_a_destination_cannot_say_is_named(tmp_path, tiny_target, refused, to, options, message) -> None:
    source = saved(tmp_path / "source", random_draft(tiny_target, **options))
    line = refused(source, tmp_path / "out", to)
    with pytest.raises(e3.UserError, match=message):
        raise e3.UserError(line)


def test_a_broken_source_leaves_nothing(tmp_path: Path, tiny_draft, refused) -> None:
    broken = write(tmp_path / "a", tiny_draft, "sglang", rename=lambda name: name.replace("q_proj", "qq_proj"))
    assert "qq_proj" in refused(broken, tmp_path / "out", "speculators")
    lacking = write(tmp_path / "b", tiny_draft, "sglang", tensors={"midlayer.mlp.up_proj.weight": None})
    assert "missing: layers.0.mlp.up_proj.weight" in refused(lacking, tmp_path / "out", "speculators")
    nan = write(tmp_path / "n", tiny_draft, "sglang", tensors={"norm.weight": np.full(64, np.nan, np.float32)})
    assert "norm.weight holds NaN or infinity" in refused(nan, tmp_path / "out", "speculators")
    silent = write(tmp_path / "c", tiny_draft, "safeailab")
    assert "--taps" in refused(silent, tmp_path / "out", "speculators")
    assert "no list of numbers" in refused(silent, tmp_path / "out", "speculators", "--taps", "two")
    assert "name a point twice" in refused(silent, tmp_path / "out", "speculators", "--taps", "2,2,4")


def test_an_existing_folder_is_kept(tmp_path: Path, tiny_draft, run) -> None:
    source = saved(tmp_path / "source", tiny_draft)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years")
    code, _, err = run("convert", source, tmp_path / "notes", "--to", "sglang")
    assert code == 2 and "is no draft folder" in err and (tmp_path / "notes" / "thesis.txt").exists()
    code, _, err = run("convert", source, source, "--to", "sglang")
    assert code == 2 and "same folder" in err
    (tmp_path / "file").write_text("mine")
    code, _, err = run("convert", source, tmp_path / "file", "--to", "sglang")
    assert code == 2 and err.count("\n") == 1 and (tmp_path / "file").read_text() == "mine"
    e3.save_draft(tiny_draft, tmp_path / "run")
    inner = saved(tmp_path / "run" / "export", tiny_draft)
    code, _, err = run("convert", inner, tmp_path / "run", "--to", "sglang")
    assert code == 2 and "the source inside it" in err and (inner / "config.json").exists()


def test_bad_places_are_found_before_anything_is_written(tmp_path: Path, tiny_draft, refused, run, monkeypatch) -> None:
    source = saved(tmp_path / "source", tiny_draft)
    assert "--json" in (line := refused(source, tmp_path / "out", "sglang", "--json", source)) and "is a folder" in line
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, _, err = run("convert", source, ".", "--to", "sglang")
    assert code == 2 and "current folder" in err and err.count("\n") == 1 and not list((tmp_path / "here").iterdir())


def test_the_convention_of_the_source(tmp_path: Path, tiny_draft, convert, refused) -> None:
    inner = {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    source = write(tmp_path / "source", tiny_draft, "sglang", eagle_config=inner)
    assert "--convention" in refused(source, tmp_path / "out", "speculators")
    for convention, taps in (("block-input", [2, 4, 6]), ("block-output", [3, 5, 7])):
        convert(source, tmp_path / convention, "speculators", "--convention", convention)
        assert list(e3.load_draft(tmp_path / convention).taps) == taps


def test_the_source_is_shown_with_what_one_should_ask(tmp_path: Path, tiny_target, run) -> None:
    source = write(tmp_path / "a", random_draft(tiny_target, norm_output=True), "sglang", norm_output=True)
    code, _, err = run("convert", source, tmp_path / "out", "--to", "speculators")
    assert code == 0 and f"read {source} (sglang): taps [2, 4, 6]" in err and "SpecForge means" in err
    for version, warned in (("0.3.0", True), ("0.4.0.5", True), ("0.5.0", False)):
        old = write(tmp_path / version, random_draft(tiny_target), "speculators", speculators_version=version)
        code, _, err = run("convert", old, tmp_path / f"to {version}", "--to", "sglang")
        assert code == 0 and ("reads [3, 5, 7] (--convention block-output), not [2, 4, 6]" in err) == warned, err


def test_the_target_is_compared(tmp_path: Path, tiny_target, tiny_folder, tiny_draft, refused, convert) -> None:
    source = saved(tmp_path / "source", tiny_draft)
    line = refused(source, tmp_path / "out", "sglang", "--target", tiny_folder)
    assert "embed_tokens differs from the target's" in line  # SGLang would use the target's
    convert(source, tmp_path / "kept", "speculators", "--target", tiny_folder)
    table = tiny_target.params["model"]["embed_tokens"]
    shared = saved(tmp_path / "shared", tiny_draft.with_params({**tiny_draft.params, "embed_tokens": table}))
    convert(shared, tmp_path / "out", "sglang", "--target", tiny_folder)
    far = saved(tmp_path / "far", random_draft(tiny_target, taps=(2, 4, 9)))
    assert "tap 9 does not exist" in refused(far, tmp_path / "beyond", "speculators", "--target", tiny_folder)


def test_a_gguf_is_never_named_as_the_verifier(tiny_draft) -> None:
    nameless = dataclasses.replace(tiny_draft, facts={"verifier": {}, "target": {}})
    trained = dataclasses.replace(nameless, facts={"verifier": {}, "target": {"hub_id": "org/t"}})
    for file, draft, name in (("t.gguf", nameless, None), ("t.gguf", trained, "org/t"), ("folder", nameless, "folder")):
        facts = TargetFacts(Path(file), 8, 64, 512, ("LlamaForCausalLM",), 128)
        assert _named(draft, file, facts).facts["verifier"].get("name_or_path") == name


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("speculators", 'vllm serve TARGET --speculative-config \'{"method": "eagle3", "model": '),
        ("sglang", "--speculative-algorithm EAGLE3 --speculative-draft-model-path"),
        ("safeailab", "EaModel.from_pretrained(base_model_path='TARGET'"),
    ],
)
def test_the_serving_command(tmp_path: Path, tiny_target, run, to: str, expected: str) -> None:
    source = saved(tmp_path / "source", random_draft(tiny_target, taps=(2, 4, 5)))
    code, out, _ = run("convert", source, tmp_path / "out", "--to", to, "--print-serve", "--json", tmp_path / "j")
    assert code == 0 and expected in out.splitlines()[-1] and str(tmp_path / "out") in out
    assert json.loads((tmp_path / "j").read_text())["format"] == to


def test_the_module_is_the_command(tmp_path: Path, tiny_draft, monkeypatch, capfd) -> None:
    source = saved(tmp_path / "source", tiny_draft)
    for arguments, code in ((["inspect", source], 0), ([source, tmp_path / "out", "--to", "sglang"], 0), (["x"], 2)):
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module("convert", run_name="__main__")
        assert stopped.value.code == code
    assert "did you mean" not in capfd.readouterr().err and e3.load_draft(tmp_path / "out").config == tiny_draft.config

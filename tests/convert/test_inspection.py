"""`python -m convert inspect`: what is in a draft folder, and what servers would silently do with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eagle3_jax as e3
from convert.inspection import inspect, render
from convert.target import target_facts
from eagle3_jax.cli.main import main
from tests.convert.folders import write
from tests.tiny import SCATTERED, random_draft


def said(found: dict[str, Any], server: str) -> str:
    return " | ".join(found["servers"][server])


def test_everything_about_a_draft(tmp_path: Path, tiny_draft, capfd) -> None:
    folder = write(tmp_path / "draft", tiny_draft, "speculators")
    assert main(["inspect", str(folder), "--json", str(tmp_path / "found.json")]) == 0
    text, found = capfd.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert (found["format"], found["architecture"]) == ("speculators", "Eagle3DraftModel")
    assert found["taps"] == [2, 4, 6] and "id k is the input of block k" in found["source_words"]
    assert found["ids_in_file"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert not any(value for flag, value in found["flags"].items() if flag != "use_aux_hidden_state")
    assert found["vocabulary"] == {
        "draft": 128,
        "target": 512,
        "d2t": True,
        "t2d": True,
        "ascending": True,
        "health": "ascending, in range, no id twice, agrees with t2d",
    }
    assert (found["rope"]["rope_theta"], found["dtype"]) == (500000.0, ["float32"])
    assert (found["verifier"], found["speculative_tokens"]) == ("org/target", 5)
    assert found["servers"]["vllm"] == []
    for part in ("[block 2 input, block 4 input, block 6 input]", "128 of 512", "org/target", "serves it as trained"):
        assert part in text


def test_taps_that_the_file_leaves_open(tmp_path: Path, tiny_draft, tiny_target, tiny_folder) -> None:
    silent = write(tmp_path / "a", tiny_draft, "safeailab")
    found = inspect(silent)
    assert found["taps"] is None and "--taps" in found["taps_unknown"] and found["likely_taps"] == []
    assert "may capture (2, N//2, N-3)" in said(found, "vllm") and "so it captures" in said(found, "sglang")
    assert "taps        unknown" in render(found)
    assert inspect(silent, e3.TapSet([2, 4, 6]))["taps"] == [2, 4, 6]
    four = write(tmp_path / "four", random_draft(tiny_target, taps=(1, 2, 3, 4)), "safeailab")
    found = inspect(four, target=target_facts(str(tiny_folder)))
    assert found["taps"] is None and found["likely_taps"] == [[2, 4, 5], [3, 5, 6]]
    inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}}
    found = inspect(write(tmp_path / "b", tiny_draft, "sglang", **inner))
    assert found["taps"] is None and found["likely_taps"] == [[3, 5, 7], [2, 4, 6]]
    four = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4, 6]}}
    with pytest.raises(e3.UserError, match=r"names 4 taps .* but fc\.weight is 192 wide"):  # the file is to blame
        inspect(write(tmp_path / "c", tiny_draft, "sglang", **four))


def test_ids_in_the_wrong_place(tmp_path: Path, tiny_draft) -> None:
    top = write(tmp_path / "a", tiny_draft, "sglang", eagle_aux_hidden_state_layer_ids=[2, 4, 6], eagle_config=None)
    assert "silent: ids are top-level, where it does not look" in said(inspect(top), "sglang")
    assert inspect(top)["servers"]["vllm"] == []
    nested = inspect(write(tmp_path / "b", tiny_draft, "sglang"))
    assert "silent: ids are only in eagle_config" in said(nested, "vllm") and nested["servers"]["sglang"] == []
    assert "take its ids as block inputs, [1, 3, 5]; the draft reads [2, 4, 6]" in said(nested, "vllm")


def test_names_that_are_ignored(tmp_path: Path, tiny_draft) -> None:
    found = inspect(write(tmp_path / "draft", tiny_draft, "modelopt"))
    assert found["format"] == "modelopt" and not found["vocabulary"]["t2d"]
    assert "know midlayer.* only and ignore layers.0.*" in said(found, "sglang")
    assert "looks up midlayer.* only" in said(found, "sglang-jax")


def test_flags_that_are_ignored(tmp_path: Path, tiny_target) -> None:
    draft = random_draft(tiny_target, norm_before_residual=True, norm_before_fc=True, norm_output=True)
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    found = inspect(write(tmp_path / "draft", draft, "sglang", **flags))
    assert "silent: ignores norm_before_residual, norm_before_fc" in said(found, "sglang")
    assert "norm_before_residual" in said(found, "sglang-jax")
    assert "norm_before_residual" not in said(found, "tpu-inference")  # which knows it
    assert "norm_before_fc, norm_output" in said(found, "tpu-inference")
    assert "older versions, which drop norm_before_fc, norm_output" in said(found, "vllm")
    assert any("SpecForge means" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("taps", "ids", "server", "sentence"),
    [
        ((4, 2, 6), [4, 2, 6], "vllm", "ascending order, .2, 4, 6., but fc was trained on .4, 2, 6."),
        ((2, 4, 8), [2, 4, 8], "vllm", "the last block's output .tap 8. needs a newer one"),
        ((0, 3, 6), [0, 3, 6], "vllm", "the embedding .tap 0. needs a newer one"),
        ((2, 3, 5, 6), [2, 3, 5, 6], "vllm", "build fc for 3 taps and fail to load this one with 4"),
    ],
)
def test_taps_that_servers_capture_otherwise(tmp_path, tiny_target, tiny_folder, taps, ids, server, sentence) -> None:
    folder = write(
        tmp_path / "draft", random_draft(tiny_target, taps=taps), "speculators", eagle_aux_hidden_state_layer_ids=ids
    )
    found = inspect(folder, target=target_facts(str(tiny_folder)))
    with pytest.raises(e3.UserError, match=sentence):
        raise e3.UserError(said(found, server))


def test_the_jax_servers_capture_fixed_taps(tmp_path: Path, tiny_target) -> None:
    draft = random_draft(tiny_target, taps=(2, 5, 6))
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}}
    wrong = inspect(write(tmp_path / "a", draft, "sglang", **ids))
    assert "whatever the ids say; the draft reads [2, 5, 6]" in said(wrong, "sglang-jax")
    draft = random_draft(tiny_target, taps=(2, 4, 5))
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    right = inspect(write(tmp_path / "b", draft, "sglang", **ids))
    assert said(right, "tpu-inference") == "captures (2, N//2, N-3) of the target: right for one of 8 blocks only"


def test_weights_that_are_not_finite_are_told(tmp_path: Path, tiny_draft) -> None:
    folder = write(tmp_path / "draft", tiny_draft, "sglang", tensors={"norm.weight": np.full(64, np.inf, np.float32)})
    assert any("norm.weight holds NaN or infinity" in note for note in inspect(folder)["notes"])


def test_a_map_in_another_order(tmp_path: Path, tiny_target) -> None:
    draft = random_draft(tiny_target, d2t=SCATTERED[::-1].copy())
    found = inspect(write(tmp_path / "draft", draft, "modelopt"))
    assert found["vocabulary"]["health"].startswith("in another order") and not found["vocabulary"]["ascending"]
    assert np.array_equal(e3.load_draft(tmp_path / "draft").d2t, SCATTERED[::-1])


def test_yarn_in_a_modelopt_export_is_pointed_out(tmp_path: Path, tiny_draft) -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    found = inspect(write(tmp_path / "draft", tiny_draft, "modelopt", rope_scaling=yarn))
    assert any("trained with plain rope" in note for note in found["notes"])


def test_what_training_and_serving_do_differently(tmp_path: Path, tiny_draft) -> None:
    def notes(name: str, layout: str, **changes: Any) -> str:
        return " ".join(inspect(write(tmp_path / name, tiny_draft, layout, **changes), e3.TapSet([2, 4, 6]))["notes"])

    assert "ignores rope_theta and rotates by 10000" in notes("a", "safeailab")
    assert "ignores rope_theta" not in notes("b", "safeailab", rope_theta=10000.0)
    assert "norms the hidden state twice" in notes("c", "modelopt")
    assert "a valid map of absolute ids as well" in notes("maps", "modelopt")  # every fourth id, and no t2d
    assert "absolute ids" not in notes("with t2d", "sglang")
    tied = inspect(write(tmp_path / "d", tiny_draft, "sglang", tie_word_embeddings=True))
    assert "uses the embedding as lm_head" in said(tied, "sglang")


def test_a_draft_of_fewer_positions_than_its_target(tmp_path: Path, tiny_draft, tiny_folder) -> None:
    target = target_facts(str(tiny_folder))
    for positions, warned in ((64, True), (128, False)):
        folder = write(tmp_path / str(positions), tiny_draft, "sglang", max_position_embeddings=positions)
        assert any("fail on longer prompts" in note for note in inspect(folder, target=target)["notes"]) == warned


def test_sizes_that_a_text_config_leaves_out(tmp_path: Path) -> None:
    text = {"model_type": "llama", "vocab_size": 32064}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlavaForConditionalGeneration"], "text_config": text})
    )
    facts = target_facts(str(tmp_path))
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (32, 4096, 32064)


def test_what_is_no_draft_is_one_line(tiny_folder: Path, capfd) -> None:
    assert main(["inspect", str(tiny_folder)]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and "is it the target?" in captured.err and captured.err.count("\n") == 1

"""`eagle3 bench`: rows of api.md, batches, and bad input."""

import json

import pytest

from eagle3_jax import load_target, save_draft
from tests.cli.tiny_target import write_prompts
from tests.tiny import random_draft


@pytest.fixture(scope="module")
def files(target, tmp_path_factory):
    """(draft folder, file of three prompts)."""
    folder = tmp_path_factory.mktemp("bench")
    loaded = load_target(target, "float32")
    save_draft(random_draft(loaded, taps=(0, 1, 2), d2t=range(0, loaded.config.vocab_size, 2)), folder / "draft")
    return folder / "draft", write_prompts(folder / "prompts.jsonl", [["what"], ["who is it"], ["why"]])


def test_rows_have_the_documented_keys_and_count_full_batches(eagle3, target, files, tmp_path):
    draft, prompts = files
    options = ("--strategies", "plain,tree:2x2x4", "--batch", "1,2", "--max-new-tokens", 6, "--dtype", "float32")
    result = eagle3(
        *("bench", "--target", target, "--draft", draft, "--prompts", prompts, *options, "--json", tmp_path / "b.json")
    )
    assert result.code == 0
    assert [line for line in result.err.splitlines() if "left out" in line] == [
        "batch 2: the last 1 of 3 prompts are left out, they fill no batch"
    ]
    content = json.loads((tmp_path / "b.json").read_text())
    assert set(content) == {"rows", "machine", "versions"}
    assert [(r["strategy"], r["batch"]) for r in content["rows"]] == [
        *(("plain", 1), ("tree:2x2x4", 1), ("plain", 2), ("tree:2x2x4", 2))
    ]
    for row in content["rows"]:
        keys = "strategy batch prompts tok_s ms_per_token tau acceptance_by_depth speedup_vs_plain identical_to_plain"
        assert set(row) == set(keys.split())
        assert row["prompts"] == {1: 3, 2: 2}[row["batch"]] and row["identical_to_plain"] == 1.0
        assert len(row["acceptance_by_depth"]) == (2 if row["strategy"] != "plain" else 0)
    assert content["rows"][0]["tau"] == 1.0 and content["rows"][0]["speedup_vs_plain"] == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--batch", "1,x"), "--batch 1,x"),
        (("--batch", "0"), "--batch 0"),
        (("--batch", "8"), "needs as many prompts"),
        (("--strategies", "plain,tree:2x2"), "chain:K"),
        (("--temperature", "-1"), "temperature -1.0"),
    ],
)
def test_bad_input_is_one_line(eagle3, target, files, change, words):
    draft, prompts = files
    result = eagle3("bench", "--target", target, "--draft", draft, "--prompts", prompts, "--dtype", "float32", *change)
    assert words in result.complaint


def test_a_prompt_that_is_too_long_is_named_before_anything_is_measured(eagle3, target, files, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", [["what"], ["who " * 70], ["why"]])
    result = eagle3("bench", "--target", target, "--draft", files[0], "--prompts", prompts, "--dtype", "float32")
    assert "prompt 2 has" in result.complaint and "the target's context is 256" in result.complaint

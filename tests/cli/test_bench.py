"""`eagle3 bench`: rows of api.md, batches, and bad input.

Where nothing depends on it the batch is 2, so that all tests share one set of compiled programs.
"""

import json

import pytest

from eagle3_jax import UserError, load_draft, load_target, save_draft
from eagle3_jax.bench.plot import draw
from eagle3_jax.speculate import controller
from tests.cli.tiny_target import write_prompts
from tests.tiny import not_a_number, random_draft


@pytest.fixture(scope="module")
def files(target, tmp_path_factory):
    """(draft folder, file of three prompts)."""
    folder = tmp_path_factory.mktemp("bench")
    loaded = load_target(target, "float32")
    save_draft(random_draft(loaded, taps=(0, 1, 2), d2t=range(0, loaded.config.vocab_size, 2)), folder / "draft")
    return folder / "draft", write_prompts(folder / "prompts.jsonl", [["what"], ["who is it"], ["why"]])


def bench(eagle3, target, files, json_file, *options):
    draft, prompts = files
    arguments = ("--target", target, "--draft", draft, "--prompts", prompts, "--max-new-tokens", 6)
    result = eagle3("bench", *arguments, "--dtype", "float32", "--json", json_file, *options)
    assert result.code == 0, result.err
    return result, json.loads(json_file.read_text())


@pytest.mark.parametrize(("strategy", "batches"), [("chain:2", "2,2"), ("tree:2x2x4", "1,2,1")])
def test_rows_have_the_documented_keys_and_count_full_batches(eagle3, target, files, tmp_path, strategy, batches):
    options = ("--strategies", f"{strategy},plain", "--batch", batches)
    result, content = bench(eagle3, target, files, tmp_path / "b.json", *options)
    assert [line for line in result.err.splitlines() if "left out" in line] == [
        "batch 2: the last 1 of 3 prompts are left out, they fill no batch"
    ]
    assert set(content) == {"rows", "machine", "versions"}
    sizes = [1, 2] if batches == "1,2,1" else [2]
    assert [(r["strategy"], r["batch"]) for r in content["rows"]] == [
        (name, size) for size in sizes for name in (strategy, "plain")
    ]
    keys = "strategy batch tok_s ms_per_token tau acceptance_by_depth speedup_vs_plain identical_to_plain host_share"
    of_drafts = {"v", "d", "d_floor", "bound", "decode_speedup", "of_bound"}
    for row in content["rows"]:
        drafts = row["strategy"] != "plain"
        assert set(row) == set(keys.split()) | (of_drafts if drafts else set()) and row["identical_to_plain"] == 1.0
        assert len(row["acceptance_by_depth"]) == (2 if drafts else 0) and 0 < row["host_share"] < 1
        if drafts:
            assert min(row[key] for key in of_drafts) > 0 and row["d_floor"] < 1
            assert row["bound"] == pytest.approx(row["tau"] / (row["v"] + 2 * row["d"]), rel=1e-3)
            assert row["of_bound"] == pytest.approx(row["decode_speedup"] / row["bound"], rel=1e-3)
    assert content["rows"][1]["tau"] == 1.0 and content["rows"][1]["speedup_vs_plain"] == 1.0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert result.out.count("tau / (v + K d) allows") == len(sizes) and "host " in result.out


def test_auto_and_an_oracle(eagle3, target, files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(controller, "_MENU", ("plain", "chain:2"))
    options = ("--strategies", "oracle:2,auto", "--batch", 2, "--plot", tmp_path / "b.svg")
    result, content = bench(eagle3, target, files, tmp_path / "b.json", *options)
    assert "auto, batch 2: rounds were" in result.err
    oracle, auto = content["rows"]
    assert (oracle["strategy"], auto["strategy"]) == ("oracle:2", "auto")
    assert oracle["identical_to_plain"] == auto["identical_to_plain"] == 1.0
    assert oracle["acceptance_by_depth"][0] >= 0.6  # all but where the answer that it knows has ended
    assert sorted(p.name for p in tmp_path.glob("b.*")) == ["b.json", "b.svg"]


def test_a_damaged_draft_is_told(eagle3, target, files, tmp_path):
    broken = not_a_number(load_draft(files[0]))
    save_draft(broken, tmp_path / "broken")
    arguments = ("--target", target, "--draft", tmp_path / "broken", "--prompts", files[1], "--dtype", "float32")
    result = eagle3("bench", *arguments, "--max-new-tokens", 6, "--batch", 2, "--strategies", "chain:2")
    assert "chain:2, batch 2: the draft's logits were not finite in 10 of 10 rounds" in result.err
    assert "100%" in result.out


def test_the_plot_shows_every_strategy_and_size(tmp_path):
    rows = [
        {"strategy": name, "batch": size, "tok_s": 10.0 * size, "speedup_vs_plain": 1.5, "tau": 2.0}
        | {"acceptance_by_depth": [] if name == "plain" else [0.6, 0.4]}
        for size in (1, 8)
        for name in ("plain", "chain:2")
    ]
    draw(rows, tmp_path / "plot.svg", "a title")
    draw(rows[:1], tmp_path / "plain.svg", "plain decoding alone")
    assert "<svg" in (tmp_path / "plot.svg").read_text() and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(UserError, match="cannot write the plot"):
        draw(rows, tmp_path / "no such folder" / "plot.svg", "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--batch", "1,x"), "--batch 1,x"),
        (("--batch", "0"), "--batch 0"),
        (("--batch", "9" * 5000), "/ give sizes like 1,4,8"),
        (("--batch", "8"), "needs as many prompts"),
        (("--strategies", "plain,tree:2x2"), "chain:K"),
        (("--temperature", "-1"), "temperature -1.0"),
        (("--strategies", "oracle:0"), "'chain:0' is not known"),
        (("--plot", "out.jpeg"), "--plot out.jpeg"),
        (("--plot", "no/such/out.png"), "--plot: no folder no/such"),
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

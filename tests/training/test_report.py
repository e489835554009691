"""The page of a run holds what the run wrote and stands alone, at any time; trackers get the same numbers."""

import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import decoders

from eagle3_jax.cli.main import main
from eagle3_jax.config import Config, EvaluationConfig
from eagle3_jax.data.packing import pack
from eagle3_jax.errors import UserError
from eagle3_jax.training import measured, trainer
from eagle3_jax.training.measured import evaluation_prompts
from eagle3_jax.training.metrics import Breakdown, bucket, walk_answers
from eagle3_jax.training.report import write_report
from eagle3_jax.training.report.charts import POINTS, Series, line_chart
from eagle3_jax.training.report.samples import sample_answers
from eagle3_jax.training.trackers import open_trackers
from tests.data.test_detokeniser import sentencepiece
from tests.tiny import random_draft
from tests.training.conftest import ANSWER, DEEPEST, PROMPTS, read_metrics


class Page(HTMLParser):
    """Checks that tags are balanced, and collects text and what a browser would fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.opened, self.text, self.fetched = [], "", []
        self.feed(text)
        assert not self.opened

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.opened.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone_and_shows_the_run(world, trained) -> None:
    page = Page((trained / "report.html").read_text())
    assert page.fetched == []
    result, steps = json.loads((trained / "result.json").read_text()), read_metrics(trained)
    best = max(row["heldout"]["simulated_tau"] for row in steps if "heldout" in row)
    read = "[block 1 input, block 2 input, tap 4 = last block output before the final norm]"
    for words in (
        f"{best:.3f}",
        read,
        "waiting for data",
        "finished",
        str(world.folder),
        "train.jsonl",
        "Held-out answers",
        "learning_rate",
    ):
        assert words in page.text, words
    assert f"{result['supervised_tokens']:,}" in page.text
    for chart in (
        "Loss",
        "Simulated tau",
        "Held-out acceptance by draft token",
        "Learning rate",
        "Tokens a second",
    ):
        assert chart in page.text


def test_the_page_of_an_unfinished_run_with_a_torn_line_and_hostile_names(trained, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:3]) + '\n{"step": 4, "lo')
    (run / "provenance.json").write_text(json.dumps({"target": {"path": "<script>alert(1)</script>"}}))
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "unfinished, at step 3" in Page(text).text and "<script" not in text
    for name, content in (("metrics.jsonl", '{"step": 1}\n'), ("provenance.json", "[]"), ("samples.json", "{}")):
        before = (run / name).read_text() if (run / name).exists() else "[]"
        (run / name).write_text(content)
        with pytest.raises(UserError, match=f"{name}(:1: not the metrics| is damaged)"):
            write_report(run)
        (run / name).write_text(before)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step"):
        write_report(run)
    with pytest.raises(UserError, match="give the folder of a run"):
        write_report(tmp_path)


def test_charts_keep_to_their_frame() -> None:
    x = list(range(5000))
    second = Series("b", [0, 1], [float("nan"), 2.0], "c1")
    svg = line_chart("t", [Series("a", x, [v**2 for v in x], "c0"), second], "step")
    coordinates = re.findall(r'points="([^"]+)"', svg)[0].split()
    assert len(coordinates) <= POINTS
    places = np.array([list(map(float, pair.split(","))) for pair in coordinates])
    assert places.min() >= 0 and places[:, 0].max() <= 540 and places[:, 1].max() <= 250
    assert line_chart("empty", [Series("a", [], [], "c0")], "step") == "" and "nan" not in svg.lower()
    ends = line_chart("t", [Series(str(i), [0, 1], [9.0, 0.0], "c0") for i in range(4)], "step")
    places = sorted(float(y) for y in re.findall(r'class="end" x="[^"]+" y="([^"]+)"', ends))
    assert places[-1] < 250 - 25 and min(np.diff(places)) >= 12.9  # above the numbers of the axis, and apart
    assert line_chart("nothing finite", [Series("a", [1], [float("nan")], "c0")], "step") == ""
    assert "<svg" in line_chart("flat", [Series("a", [1, 2], [3.0, 3.0], "c0")], "step")


def test_samples_colour_what_each_round_accepted() -> None:
    """Prompt of 3, answer of 7: rounds at slots 2 (two accepted), 5 (none), 6 (one)."""
    packed = pack([(np.arange(10, 20, dtype=np.int32), np.arange(10) >= 3)], 12)
    hits = np.zeros((2, 1, 11), bool)
    hits[:, 0, 2] = hits[0, 0, 6] = True
    (answer,) = walk_answers(hits, packed.loss_mask, packed.document_ids)
    assert answer.slots == [2, 5, 6] and answer.accepted == [2, 0, 1]
    (sample,) = sample_answers(packed, lambda rows, batch: hits, 1, None)
    kinds = {"given": "g", "drafted": "d", "target": "t"}
    assert "".join(kinds[kind] for _, kind in sample["tokens"]) == "gggtddttdt"
    assert [text for text, _ in sample["tokens"]] == [f"{token} " for token in range(10, 20)]
    assert sample_answers(packed, lambda rows, batch: hits, 1, sentencepiece(decoders.WordPiece())) == [sample]
    assert sample["simulated_tau"] == 2.0


def test_tau_by_source_and_by_place(trained) -> None:
    heldout = read_metrics(trained)[-1]["heldout"]
    assert list(heldout["by_source"]) == ["heldout.jsonl"] and list(heldout["by_position"]) == ["0-63"]
    assert heldout["by_source"]["heldout.jsonl"]["simulated_tau"] == pytest.approx(heldout["simulated_tau"], abs=1e-4)
    assert heldout["accuracy"] == heldout["full_acceptance"][0] <= heldout["accuracy_in_vocabulary"] <= 1
    counts = Breakdown()
    for place, accepted in ((5000, 1), (70, 2), (63, 0), (0, 1), (64, 1)):
        counts.add(bucket(place), accepted)
    assert list(counts.summary()) == ["0-63", "64-255", "4096+"]
    assert [v["simulated_tau"] for v in counts.summary().values()] == [1.5, 2.5, 2.0]


def test_real_generation_beside_the_simulated_tau(world, trained, tmp_path) -> None:
    """In float32 the two agree but for an answer's last round, which its end cuts."""
    raw = world.config(tmp_path).model_dump()
    raw |= {"evaluation": {"count": PROMPTS, "max_new_tokens": ANSWER, "strategy": f"chain:{DEEPEST}"}}
    config = Config.model_validate(raw | {"training": raw["training"] | {"epochs": 1, "evaluate_every": 100}})
    result = trainer.train(config, init_from=str(trained / "export"), target=world.target)
    generation = result["generation"]
    assert (generation["prompts"], generation["tokens"]) == (PROMPTS, PROMPTS * ANSWER)
    assert generation["strategy"] == f"chain:{DEEPEST}"
    assert generation["tau"] > 1 and abs(generation["tau"] - generation["simulated_tau"]) < 0.25
    assert "measured tau" in (config.run_dir / "report.html").read_text()


def test_prompts_without_room_for_an_answer(world, tmp_path, monkeypatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Hello"]}\n')
    monkeypatch.setattr(measured, "prompt_ids", lambda *_, **__: list(range(3, 13)))
    target = dataclasses.replace(world.target, tokenizer=object())
    room, heldout = target.config.max_positions, pack([(np.arange(3, 9, dtype=np.int32), np.arange(6) > 3)], 16)
    given = (target, random_draft(world.target, taps=(1, 2), d2t=range(9)), heldout, {})
    with pytest.raises(UserError, match=f"no prompt of the first 8 is at most 9 tokens long, .*{room} / {prompts}"):
        evaluation_prompts(EvaluationConfig(prompts=str(prompts), max_new_tokens=room - 9), *given)
    for strategy, words in (("chain:0", "is not known"), ("tree:2x10x12", "the draft's vocabulary has 9 / lower K")):
        with pytest.raises(UserError, match=words):
            evaluation_prompts(EvaluationConfig(strategy=strategy), *given)
    assert evaluation_prompts(EvaluationConfig(prompts="absent", count=0), *given) == []
    assert evaluation_prompts(EvaluationConfig(max_new_tokens=8), *given) == [[3, 4, 5, 6]]


def test_trackers_get_every_number(world, tmp_path, monkeypatch) -> None:
    calls = []
    fake = SimpleNamespace(
        id="known",
        init=lambda **facts: calls.append(("init", facts["name"], facts.get("id"), facts["resume"])) or fake,
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("finish"),
    )
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, fake)
    raw = world.config(tmp_path).model_dump() | {"tracking": {"to": ["wandb", "trackio", "tensorboard"]}}
    config = Config.model_validate(raw)
    metrics = {"step": 1, "loss": 2.0, "full_acceptance": [0.5, 0.25]}
    config.run_dir.mkdir()
    with open_trackers(config, 0) as trackers:
        trackers.log(1, metrics, {"by_source": {"a": {"rounds": 3}}})
    values = {
        "train/loss": 2.0,
        "train/full_acceptance/1": 0.5,
        "train/full_acceptance/2": 0.25,
        "heldout/by_source/a/rounds": 3.0,
    }
    init = [("init", "run", None, None), ("init", "run", None, "never")]
    assert calls == [*init, (1, values), (1, values), "finish", "finish"]
    assert list((config.run_dir / "tensorboard").glob("events*"))
    calls.clear()
    with open_trackers(config, 1):
        assert calls == [("init", "run", "known", "allow"), ("init", "run", None, "allow")]  # the same ones go on
    monkeypatch.setattr(fake, "init", lambda **facts: 1 / 0)
    with pytest.raises(UserError, match="wandb does not open / division by zero"), open_trackers(config, 0):
        pass
    monkeypatch.setitem(sys.modules, "wandb", None)
    sys.modules.pop("eagle3_jax.training.trackers.wandb", None)
    with pytest.raises(UserError, match="wandb is not installed"), open_trackers(config, 0):
        pass

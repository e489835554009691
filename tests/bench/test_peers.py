"""`bench/peers`: the protocol of turns, with a stand-in for a trainer, and what is made of the turns."""

import argparse
import gzip
import json
import os
import sys

import numpy as np
import pytest

from bench.peers import __main__ as peers
from bench.peers import comparison, inputs
from bench.peers.turns import Trainer
from tests.conftest import REPO

STAND_IN = """
import sys, time
sys.path.insert(0, {repo!r})
from bench.peers.turns import Turns
turns = Turns(tokens=250, warm_up=2, about={{"versions": {{"stand-in": "1"}}}})
print("said by a library")
for step in range({steps}):
    if step < 2:
        b"x" * (64 * 2**20)  # needed while loading only
    time.sleep(0.01)
    turns.step(100, waited=0.002)
raise ValueError("out of data")
"""


@pytest.fixture
def stand_in(tmp_path):
    """Starts a trainer of so many steps, of 100 tokens and 10 ms, two of them to warm up."""
    started = []

    def start(steps: int) -> Trainer:
        command = [sys.executable, "-c", STAND_IN.format(repo=str(REPO), steps=steps)]
        started.append(Trainer("stand-in", command, dict(os.environ), tmp_path / "log"))
        return started[-1]

    yield start
    for trainer in started:
        trainer.kill()


def test_a_trainer_trains_in_its_turns_only(stand_in, tmp_path):
    trainer = stand_in(steps=1000)
    ready = trainer.ready()
    assert ready["about"] == {"versions": {"stand-in": "1"}}
    for _ in range(2):
        turn = trainer.turn()
        assert (turn["steps"], turn["tokens"]) == (3, 300)  # the third step reaches 250 tokens
        assert turn["seconds"] > 0.03 and turn["waited"] == pytest.approx(0.006)
    last = trainer.end()
    assert 2**20 < last["peak_stepping"] < ready["peak_loading"] - 60 * 2**20
    assert (tmp_path / "log").read_text() == "said by a library\n"


def test_a_trainer_that_breaks_says_why_and_the_others_go_on(stand_in):
    class Steady:
        name = "steady"

        def turn(self):
            return {"tokens": 100, "seconds": 1.0, "steps": 1, "waited": 0.0}

        def end(self):
            return {"peak_stepping": 5}

    broken = stand_in(steps=6)
    broken.ready()
    said = []
    results = comparison.take_turns([Steady(), broken], 3, said.append)
    assert len(results["steady"]["turns"]) == 3 and results["steady"]["peak_stepping"] == 5
    assert len(results["stand-in"]["turns"]) == 1
    assert results["stand-in"]["failed"].endswith("ValueError: out of data")
    reason = results["stand-in"]["failed"]
    assert said == [
        "turn 1: steady 100.0 tok/s",
        said[1],
        "turn 2: steady 100.0 tok/s",
        reason,
        "turn 3: steady 100.0 tok/s",
    ]
    assert said[1].startswith("turn 1: stand-in ")


def test_medians_ratios_and_peaks():
    def turn(tokens, seconds, steps=2, waited=0.0):
        return {"tokens": tokens, "seconds": seconds, "steps": steps, "waited": waited}

    rows = comparison.summary(
        {
            "ours": {
                "turns": [turn(600, 2.0, waited=0.01), turn(600, 1.0, waited=0.02), turn(600, 3.0)],
                "peak_loading": 2**30,
                "peak_stepping": 2**29,
            },
            "peer": {"turns": [turn(400, 4.0, steps=4)]},
            "absent": {"turns": [], "failed": "no network"},
        }
    )
    assert list(rows) == ["ours", "peer"]
    assert (rows["ours"]["tokens_per_second"], rows["ours"]["ratio"]) == (300.0, 1.0)
    assert (rows["peer"]["tokens_per_second"], rows["peer"]["ratio"]) == (100.0, 3.0)
    assert rows["ours"]["wait"] == pytest.approx(0.005)
    assert rows["peer"]["seconds_a_step"] == 1.0 and rows["ours"]["tokens_a_step"] == 300
    lines = comparison.table(rows).splitlines()
    assert lines[2] == "| ours | 300 | 1.00x | 1.00 | 300 | 1,024, 512 | 0.50% |"
    assert lines[3] == "| peer | 100 | 3.00x | 1.00 | 100 | -, - | 0.00% |"


def test_trainers_are_named_with_options():
    assert peers.parse_trainer("specjax") == ("specjax", {"dtype": "float32"})
    name, options = peers.parse_trainer("speculators:dtype=bfloat16,row=512")
    assert options == peers.OPTIONS[name] | {"dtype": "bfloat16", "row": "512"}
    for wrong, word in (("specforge", "speculators"), ("ours:attention=eager", "dtype")):
        with pytest.raises(argparse.ArgumentTypeError, match=word):
            peers.parse_trainer(wrong)


def test_all_get_the_same_documents(tmp_path):
    rng = np.random.default_rng(0)
    answers = tmp_path / "answers.jsonl.gz"
    with gzip.open(answers, "wt") as file:
        for length in rng.integers(5, 40, 60):
            row = {"input_ids": rng.integers(0, 64, length).tolist(), "loss_mask": [0] + [1] * (int(length) - 1)}
            file.write(json.dumps(row) + "\n")
    counts = inputs.write_data(tmp_path, answers, 20, 32, 16, {"vocab_size": 64, "eos_token_id": [2, 5]})
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert len(train) == counts["documents"] == 20 and len(heldout) == inputs.HELDOUT
    assert all(len(row["input_ids"]) <= 32 for row in train) and not any(row in train for row in heldout)
    rows = np.load(tmp_path / "rows.npz")
    assert rows["ids"].shape == (counts["rows"], 32)
    assert (rows["documents"] >= 0).sum() == counts["tokens"] == sum(len(row["input_ids"]) for row in train)
    vocabulary = np.load(tmp_path / "vocabulary.npy")
    assert len(vocabulary) == 16 and {2, 5} <= set(vocabulary.tolist())

"""`eagle3 train`: from conversations to a draft, its exit codes, and what is printed meanwhile."""

import json
import signal
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
import yaml

from eagle3_jax import load_draft, load_target
from eagle3_jax.training import trainer

CHATS = ["what is it ?", "who are you ?", "where is that ?", "how is it ?"]


def write_chats(path: Path) -> str:
    chats = [
        [{"role": "user", "content": chat}, {"role": "assistant", "content": chat[::-1].strip("? ") + " yes"}]
        for chat in CHATS
    ]
    path.write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in chats))
    return str(path)


@pytest.fixture
def config(target, tmp_path) -> Path:
    """A config of four steps, evaluated once, in the test's own folder."""
    data = write_chats(tmp_path / "chats.jsonl")
    training = {"epochs": 2, "batch_rows": 2, "ttt_steps": 2, "evaluate_steps": 2, "compute_dtype": "float32"}
    training |= {"target_hub_id": "someone/tiny", "features": "ram"}  # as for the dry run: one program
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "run",
                "runs_dir": str(tmp_path / "runs"),
                "target": {"path": str(target), "dtype": "float32"},
                "data": {"train": data, "heldout": data, "length": 96},
                "draft": {"taps": [0, 1, 2], "vocab_size": 20},
                "training": training,
                "evaluation": {"count": 0},
            }
        )
    )
    return path


def test_a_run_and_its_finished_result(eagle3, config, target, tmp_path) -> None:
    run, file = tmp_path / "runs" / "run", tmp_path / "copy.json"
    result = eagle3("train", "--config", config, "training.evaluate_every=4", "--json", file)
    assert result.code == 0, result
    stored = json.loads((run / "result.json").read_text())
    assert json.loads(file.read_text()) == stored and json.loads(result.out) == stored["heldout"]
    load_draft(run / "export", target=load_target(target, "float32"))
    lines = result.err.splitlines()
    assert lines[0].startswith("taps: [embedding, block 1 input, tap 2 = last block output") and "order" in lines[0]
    assert lines[1].startswith("data: 4 documents in 3 rows of 96,")
    assert lines[2].startswith("warning: 4 of 4 held-out documents are also in the training data")
    for words in ("step 1 ", "loss ", "simulated tau ", "tok/s", "min left"):
        assert words in lines[3]
    assert "step 4 " in lines[-3] and "held-out simulated tau" in lines[-3]
    assert lines[-2].startswith("draft written to") and lines[-1].startswith("report: ")

    again = eagle3("train", "--config", config, "training.evaluate_every=4")
    assert "--resume" in again.complaint
    again = eagle3("train", "--config", config, "training.evaluate_every=4", "--resume")
    assert (again.code, again.out, again.err) == (0, result.out, "")
    assert "training.evaluate_every: 4 there, 3 here" in (
        eagle3("train", "--config", config, "training.evaluate_every=3", "--resume").complaint
    )

    options = ("--init-from", run / "export", "name=second")
    assert eagle3("train", "--config", config, *options).code == 0
    assert "expected" in eagle3("train", "--config", config, *options, "name=third", "draft.taps=[2, 1, 0]").complaint


def test_a_dry_run_begins_nothing(eagle3, config, tmp_path) -> None:
    file = tmp_path / "figures.json"
    result = eagle3("train", "--config", config, "--dry-run", "--json", file)
    assert result.code == 0 and not (tmp_path / "runs").exists()
    figures = json.loads(file.read_text())
    parameters, memory, disk, time = (figures[key] for key in ("parameters", "memory_per_device", "disk", "time"))
    # Masters and two moments: what is held at the least, and what a checkpoint is.
    assert disk["checkpoint"] == 12 * parameters["draft_trained"]
    assert memory["peak"] > disk["checkpoint"] + 4 * parameters["target"] and memory["features_in_host_memory"] > 0
    assert figures["memory_of_process"] > memory["peak"]
    assert time["steps"] == 4 and time["seconds"] > 2 * time["seconds_a_step"] > 0
    for word in (
        "parameters: ",
        "data: 3 rows of 96",
        "memory per device: ",
        "memory of this process: ",
        "disk: ",
        "time: 4 steps of ",
    ):
        assert word in result.out


def test_ctrl_c_saves_and_exits_with_130(eagle3, config, tmp_path, monkeypatch) -> None:
    real = trainer.train_step

    def pressed(*arguments):
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", pressed)
        result = eagle3("train", "--config", config)
    assert (result.code, result.out) == (130, "")
    last = result.err.splitlines()[-1]
    assert last.startswith("eagle3: stopped at step 1 of 4") and "--resume" in last and "Traceback" not in result.err
    resumed = eagle3("train", "--config", config, "--resume")
    assert resumed.code == 0 and "resuming at step 1 of 4" in resumed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["training.epoch=3"], "did you mean training.epochs?"),
        (["training.epochs=three"], "config key training.epochs:"),
        (["training.epochs"], "a.b=c"),
        (["data.train=absent.jsonl"], "absent.jsonl: no such file"),
        (["data.train=empty.jsonl"], "the file is empty"),
        (["data.train=unsupervised.jsonl"], "nothing to train on"),
        (["target.path=absent"], "no such model"),
        (["draft.taps=[1, 9]"], "tap 9 does not exist"),
        (["draft.taps=[1, 1]"], "twice"),
        (["draft.vocab_size=0"], "draft.vocab_size"),
        (["draft.vocab_size=1000"], "draft.vocab_size is 1000, the target's vocabulary 31"),
        (["data.stored.ids=[1, 2]"], "these data are none"),
        (["data.chat_template={enable_thinkng: no}"], "no variable enable_thinkng"),
        (["--init-from", "absent"], "no such model"),
        (["--resumee"], "--resume"),
        (["--coordinator", "here:1"], "--coordinator needs --processes N"),
        (["--coordinator", "auto"], "cannot join the other processes"),
        (["--json", "absent/result.json"], "no folder absent"),
        (["--json", "."], "is a folder"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_run(eagle3, config, tmp_path, monkeypatch, arguments, words) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    Path("unsupervised.jsonl").write_text(json.dumps({"input_ids": [3, 4, 5], "loss_mask": [0, 0, 0]}) + "\n")
    assert words in eagle3("train", "--config", config, *arguments).complaint
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("error", [MemoryError(), jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 5\n")])
def test_out_of_memory_is_one_line(eagle3, config, monkeypatch, error) -> None:
    monkeypatch.setattr(trainer, "train_step", Mock(side_effect=error))
    said = eagle3("train", "--config", config).err.splitlines()[-1]
    assert said.startswith("eagle3: out of memory / ") and "lower the rows" in said


def test_configs_that_cannot_be_read(eagle3, tmp_path) -> None:
    assert "--config" in eagle3("train").complaint
    assert "cannot read the config" in eagle3("train", "--config", tmp_path / "absent.yaml").complaint
    (tmp_path / "empty.yaml").write_text("")
    assert "empty" in eagle3("train", "--config", tmp_path / "empty.yaml").complaint

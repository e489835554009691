"""`eagle3 doctor`: exit status, what is printed, the JSON, the corrected draft; bad input is one line."""

import functools
import inspect
import json

import pytest

import eagle3_jax as e3
from eagle3_jax.cli.main import main
from eagle3_jax.doctor import search
from tests.doctor.test_faults import edit, state_taps


@pytest.fixture
def run(capfd):
    def call(*arguments):
        capfd.readouterr()
        code = main(["doctor", *map(str, arguments), "--dtype", "float32"])
        return code, *capfd.readouterr()

    return call


def test_a_wrong_wiring_exits_1_and_the_corrected_draft_exits_0(world, drafts, run, tmp_path, monkeypatch):
    assert inspect.signature(search.diagnose).parameters["depth"].default == 4
    monkeypatch.setattr(search, "diagnose", functools.partial(search.diagnose, depth=2))  # compiles in half the time
    e3.save_draft(drafts["good"], tmp_path / "ill")
    edit(tmp_path / "ill", lambda raw: state_taps(raw, [2, 4, 6]))
    pair = ("--target", world.folder, "--data", world.data, "--draft")
    code, out, _ = run(*pair, tmp_path / "ill", "--fix", tmp_path / "fixed", "--json", tmp_path / "d.json")
    content = json.loads((tmp_path / "d.json").read_text())
    assert code == 1 and f"verdict: {content['verdict']}" in out
    assert {"declared", "best", "accuracy_declared", "accuracy_best", "table", "verdict"} <= content.keys()
    assert content["declared"]["taps"] == [2, 4, 6] and content["best"]["taps"] == [0, 2, 4]
    assert content["accuracy_best"] > content["accuracy_declared"] and content["status"] == "wrong"
    assert content["table"][0]["taps"] == [0, 2, 4] and len(content["table"][0]["accuracy_by_depth"]) == 2
    assert '"eagle_aux_hidden_state_layer_ids": [0, 2, 4]' in out and "SGLang  cannot serve it" in out
    code, out, err = run(*pair, tmp_path / "fixed", "--fix", tmp_path / "again", "--json", tmp_path / "d.json")
    content = json.loads((tmp_path / "d.json").read_text())
    assert code == 0 and content["declared"] == content["best"] and content["status"] == "best"
    assert not (tmp_path / "again").exists() and "nothing that a config can correct" in err


def test_bad_input_is_one_line(world, drafts, run, tmp_path):
    e3.save_draft(drafts["good"], tmp_path / "draft")
    (tmp_path / "bad.jsonl").write_text('{"body": "x"}\n')
    pair = ("--target", world.folder, "--draft", tmp_path / "draft", "--data")
    for arguments, words in (
        ((*pair, tmp_path / "bad.jsonl"), "unknown shape of row"),
        ((*pair, world.data, "--fix", tmp_path / "draft"), "is the draft itself"),
        ((*pair, world.data, "--tokens", "0"), "--tokens"),
        ((*pair, world.data, "--mesh", "data=2"), "data is for training"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1

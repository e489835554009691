"""Every class of wiring fault, planted in a good draft on disk, is found, and the corrected draft is the good one."""

import dataclasses
import functools
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax.cli.main import main
from eagle3_jax.doctor import search
from eagle3_jax.doctor.fix import repairable, write_fix
from eagle3_jax.doctor.opening import open_draft
from eagle3_jax.doctor.report import remarks, status, verdict
from eagle3_jax.models.weights import flatten
from eagle3_jax.training.evaluate import simulate
from tests.doctor.conftest import LAYERS, TAPS


def _taps(*taps):
    return lambda folder: edit(folder, lambda raw: state_taps(raw, list(taps)))


def _flag(**flags):
    return lambda folder: edit(folder, lambda raw: raw.update(flags))


def _theta(theta):
    def change(raw):
        raw["transformer_layer_config"]["rope_parameters"]["rope_theta"] = theta

    return lambda folder: edit(folder, change)


def _both(*faults):
    def plant(folder):
        for fault in faults:
            fault(folder)

    return plant


def edit(folder: Path, change) -> None:
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def state_taps(raw: dict, taps: list[int]) -> None:
    raw["eagle_aux_hidden_state_layer_ids"] = raw["eagle3_jax"]["taps"] = taps


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def absolute_map(folder: Path) -> None:
    rewrite(folder, lambda t: t.update(d2t=t["d2t"] + np.arange(len(t["d2t"]))))


def lost_map(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("d2t"))


def twice_subtracted_map(folder: Path) -> None:
    rewrite(folder, lambda t: t.update(d2t=t["d2t"] - np.arange(len(t["d2t"]))))


def norms_joined(folder: Path) -> None:
    """The norms of the taps stored as one norm over all of them, flag included."""

    def change(tensors):
        tensors["input_norm.weight"] = np.concatenate([tensors.pop(f"fc_norm.{i}.weight") for i in range(len(TAPS))])

    rewrite(folder, change)
    _flag(fc_norm=False, norm_before_fc=True)(folder)


def only_the_servers_taps(folder: Path) -> None:
    def change(raw):
        raw["eagle_aux_hidden_state_layer_ids"] = [2, 4, 6]

    edit(folder, change)


def no_taps(folder: Path) -> None:
    def change(raw):
        del raw["eagle_aux_hidden_state_layer_ids"], raw["eagle3_jax"]["taps"]

    edit(folder, change)


FAULTS = {
    "the founding story": _taps(2, 4, 6),
    "ids one too high": _taps(1, 3, 5),
    "ids one too low, the embedding kept": _taps(0, 1, 3),
    "order": _taps(4, 2, 0),
    "embedding out": _taps(1, 2, 4),
    "last layer in": _taps(0, 2, LAYERS),
    "norm_before_residual": _flag(norm_before_residual=True),
    "rope theta": _theta(10000.0),
    "order and residual": _both(_taps(2, 0, 4), _flag(norm_before_residual=True)),
    "d2t of absolute ids": absolute_map,
    "d2t lost": lost_map,
    "arange subtracted twice": twice_subtracted_map,
    "two statements of taps": only_the_servers_taps,
    "no statement of taps": no_taps,
}

# Planted in the EAGLE-3.1 draft. To depth 1, which is compiled for screening anyway, but for what is fed back.
NORM_FAULTS = {
    "norm_output": (2, _flag(norm_output=False)),
    "fc_norm not carried over": (1, _flag(fc_norm=False)),
    "norms before fc joined": (1, norms_joined),
}


@pytest.mark.parametrize("fault", [*FAULTS, *NORM_FAULTS])
def test_a_planted_fault_is_found_and_repaired(world, doctor, drafts, tmp_path, fault):
    depth, plant = NORM_FAULTS.get(fault) or (2, FAULTS[fault])
    good = drafts["3.1" if fault in NORM_FAULTS else "good"]
    e3.save_draft(good, tmp_path / "ill", speculative_tokens=5)
    plant(tmp_path / "ill")
    opened = open_draft(tmp_path / "ill", world.target)
    diagnosis = doctor(opened, depth)
    best, declared = diagnosis.best, diagnosis.declared
    assert best.wiring.config == good.config, verdict(diagnosis, LAYERS)
    assert np.array_equal(opened.maps[best.wiring.d2t], good.d2t)
    if best is not declared:
        assert status(diagnosis) == "wrong" and best.above(declared) > 3 and best.tokens > declared.tokens
    assert best is not declared or opened.faults  # otherwise nothing was planted
    if fault == "the founding story":
        low, high = (f"{100 * m.accuracy[0]:.0f} %" for m in (declared, best))
        assert verdict(diagnosis, LAYERS) == (
            "trained with [embedding, block 2 input, block 4 input], "
            f"served with [block 2 input, block 4 input, block 6 input]: {low} -> {high}"
        )
        assert best.accuracy[0] > declared.accuracy[0] + 0.15
    assert repairable(best.wiring, opened)
    write_fix(opened, best.wiring, tmp_path / "fixed")
    fixed = e3.load_draft(tmp_path / "fixed")
    assert fixed.config == good.config and np.array_equal(fixed.d2t, good.d2t)
    ours, theirs = flatten(fixed.params), flatten(good.params)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)
    raw = json.loads((tmp_path / "fixed" / "config.json").read_text())
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert raw["eagle3_jax"]["doctor"]["changed"] == best.wiring.changes(declared.wiring)


def test_a_healthy_draft_is_left_alone(world, doctor, drafts, tmp_path):
    e3.save_draft(drafts["good"], tmp_path / "draft")
    opened = open_draft(tmp_path / "draft", world.target)
    diagnosis = doctor(opened)
    assert diagnosis.healthy and status(diagnosis) == "best" and not repairable(diagnosis.best.wiring, opened)
    assert diagnosis.finalists[0] is diagnosis.declared and not opened.faults
    assert "the declared wiring" in verdict(diagnosis, LAYERS) and remarks(diagnosis, LAYERS) == []


def test_a_teacher_without_the_final_norm_is_told_and_not_repaired(world, doctor, drafts, tmp_path):
    e3.save_draft(drafts["wrong teacher"], tmp_path / "draft")
    opened = open_draft(tmp_path / "draft", world.target)
    diagnosis = doctor(opened)
    best = diagnosis.best.wiring
    assert best == dataclasses.replace(opened.declared, teacher="no final norm")
    assert not repairable(best, opened)
    assert any("train again" in line for line in remarks(diagnosis, LAYERS))


def test_a_last_tap_after_the_final_norm_is_told_and_not_repaired(world, doctor, drafts, tmp_path):
    e3.save_draft(drafts["last tap normed"], tmp_path / "draft")
    opened = open_draft(tmp_path / "draft", world.target)
    diagnosis = doctor(opened)
    best = diagnosis.best.wiring
    assert best == dataclasses.replace(opened.declared, last_normed=True)
    assert not repairable(best, opened)
    assert "last block output after the final norm" in verdict(diagnosis, LAYERS)
    assert any("before the norm" in line for line in remarks(diagnosis, LAYERS))


def test_what_is_no_fault_of_wiring_is_refused_as_by_the_loader(world, drafts, tmp_path):
    e3.save_draft(drafts["good"], tmp_path / "draft")
    rewrite(tmp_path / "draft", lambda t: t.pop("layers.0.mlp.up_proj.weight"))
    with pytest.raises(e3.UserError, match=r"missing: layers\.0\.mlp\.up_proj"):
        open_draft(tmp_path / "draft", world.target)
    no_taps(tmp_path / "draft")  # with a second fault that can be mended, the first still stands
    with pytest.raises(e3.WiringError, match="does not say which target layers"):
        open_draft(tmp_path / "draft", world.target)


@pytest.mark.parametrize("block", ["x", [1], {"target": 5}])
def test_a_block_of_another_type_is_refused_as_by_the_loader(world, tmp_path, block):
    e3.save_draft(world.untrained(), tmp_path / "draft")
    edit(tmp_path / "draft", lambda raw: raw.update(eagle3_jax=block))
    with pytest.raises(e3.UserError, match="of a wrong type / .*eagle3_jax"):
        open_draft(tmp_path / "draft", world.target)


def test_accuracy_is_the_full_acceptance_of_training(world, drafts, doctor, tmp_path):
    e3.save_draft(drafts["good"], tmp_path / "draft")
    measured = doctor(open_draft(tmp_path / "draft", world.target)).declared
    length = len(world.documents[0][0])
    summary = simulate(world.target, drafts["good"], world.documents, 2, length, len(world.documents)).summary()
    assert np.allclose(measured.accuracy, summary["full_acceptance"], atol=1e-5)
    assert measured.tokens == pytest.approx(summary["slot_tau"], abs=1e-5)


# --- eagle3 doctor: exit status, what is printed, the JSON, the corrected draft. In this file, so that one process
# trains the drafts and compiles the search.


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
        ((*pair, world.data, "--fix", world.folder), "is no draft folder"),
        ((*pair, world.data, "--tokens", "0"), "--tokens"),
        ((*pair, world.data, "--mesh", "data=2"), "data is for training"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1

"""Whole runs on a tiny target: what they write, and that interruptions, limits and mistakes do no harm."""

import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax.config import Config
from eagle3_jax.draft.draft import binding_warning
from eagle3_jax.errors import UserError
from eagle3_jax.training import run_folder, trainer
from tests.training.conftest import ANSWER, DEEPEST, PROMPTS, read_metrics, write_rows

TODAY = datetime.date(2026, 2, 28)
REPO = Path(__file__).resolve().parents[2]


def train(world, config: Config, **options):
    return trainer.train(config, target=world.target, **options)


def final_state(run: Path) -> list[np.ndarray]:
    """All arrays of the newest checkpoint: weights, moments, step."""
    with ocp.CheckpointManager((run / "checkpoints").absolute()) as manager:
        newest = manager.latest_step()
        restored = manager.restore(newest, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(restored["state"])]


def untimed(run: Path) -> list[dict]:
    """The metrics without what depends on the clock."""
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "wait", "tokens_per_second")}
        for row in read_metrics(run)
    ]


def assert_same_run(a: Path, b: Path) -> None:
    assert untimed(a) == untimed(b)
    for got, expected in zip(final_state(a), final_state(b), strict=True):
        np.testing.assert_array_equal(got, expected)
    first, second = (load_file(run / "export" / "model.safetensors") for run in (a, b))
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    results = [json.loads((run / "result.json").read_text()) for run in (a, b)]
    assert results[0] | {"name": "", "export": ""} == results[1] | {"name": "", "export": ""}


# ------------------------------------------------------------------------------------------------ what a run writes


def test_the_loss_goes_down_and_the_draft_becomes_useful(trained) -> None:
    metrics = read_metrics(trained)
    losses = [row["loss"] for row in metrics]
    assert len(losses) == 96 and np.mean(losses[-8:]) < 0.5 * np.mean(losses[:2])
    assert metrics[-1]["simulated_tau"] > 1.2 > metrics[0]["simulated_tau"]


def test_metrics_of_every_step(trained) -> None:
    for i, row in enumerate(read_metrics(trained)):
        assert row["step"] == i + 1
        assert row["loss"] == pytest.approx(sum(row["loss_by_step"]), abs=1e-4) and len(row["loss_by_step"]) == 2
        assert len(row["full_acceptance"]) == len(row["conditional_acceptance"]) == 2
        assert row["simulated_tau"] >= 1 and row["slot_tau"] == pytest.approx(1 + sum(row["full_acceptance"]), abs=1e-4)
        assert row["grad_norm"] > 0 and row["seconds"] > 0 and row["tokens_per_second"] > 0
        assert ("heldout" in row) == (row["step"] % 32 == 0)
    heldout = read_metrics(trained)[-1]["heldout"]
    assert len(heldout["full_acceptance"]) == 3 and heldout["loss_first_step"] > 0
    assert {"simulated_tau", "slot_tau", "conditional_acceptance"} < set(heldout)
    assert [row["epoch"] for row in read_metrics(trained)][7::8] == [float(epoch) for epoch in range(1, 13)]


def test_the_run_folder(world, trained) -> None:
    names = {path.name for path in trained.iterdir()}
    files = {"config.yaml", "provenance.json", "metrics.jsonl", "result.json", "samples.json", "report.html"}
    assert names == files | {"checkpoints", "export"}
    config = Config.model_validate(yaml.safe_load((trained / "config.yaml").read_text()))
    assert config.run_dir == trained and config.data.train == world.train
    provenance = json.loads((trained / "provenance.json").read_text())
    assert provenance["target"]["fingerprint"] == world.target.fingerprint
    assert set(provenance["data"]) == {world.train} and provenance["versions"]["jax"] == jax.__version__
    assert provenance["packing"]["documents"] == 32 and provenance["refused_rows"] == 0
    result = run_folder.read_result(trained)
    assert result["total_steps"] == 96 and result["taps"] == [1, 2, 4] and result["export"] == str(trained / "export")
    assert result["supervised_tokens"] == sum(len(a) for a in world.answers[:32])


def test_the_export_says_what_it_belongs_to(world, trained) -> None:
    raw = json.loads((trained / "export" / "config.json").read_text())
    own, result = raw["eagle3_jax"], run_folder.read_result(trained)
    assert own["taps"] == raw["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert own["taps_convention"] == "block-input"
    assert own["target"]["hub_id"] == raw["speculators_config"]["verifier"]["name_or_path"] == "someone/tiny"
    assert own["target"]["fingerprint"] == world.target.fingerprint and "tokenizer_fingerprint" in own["target"]
    assert own["training"]["ttt_steps"] == 2 and own["training"]["step"] == result["step"]
    assert own["training"]["simulated_tau"] == result["heldout"]["simulated_tau"]


def test_the_export_loads_and_generates_losslessly(world, trained) -> None:
    draft = e3.load_draft(trained / "export", target=world.target)
    assert draft.dtype == np.float32 and binding_warning(draft, world.target) is None
    # The shapes of test_parity.py, whose compiled programs this uses.
    prompts, answers = world.prompts[:PROMPTS], world.answers[:PROMPTS]
    results = e3.generate(world.target, draft, prompts, ANSWER, f"chain:{DEEPEST}", stop_token_ids=())
    assert [r.tokens for r in results] == [a[:ANSWER] for a in answers]
    assert max(r.tau for r in results) > 1


def test_the_best_checkpoint_is_exported_and_not_the_last(world, tmp_path) -> None:
    config, taus = world.config(tmp_path, training={"epochs": 2, "checkpoint_every": 2}), iter([1.2, 1.7, 1.4, 1.3])
    real = trainer.evaluate
    states = {}

    def evaluate(run, state):
        states[int(state.step)] = np.array(state.trainable["fc"]["weight"])
        return real(run, state) | {"simulated_tau": next(taus)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "evaluate", evaluate)
        result = train(world, config)
    assert result["step"] == 4 and result["heldout"]["simulated_tau"] == 1.7 and list(states) == [2, 4, 6, 8]
    exported = load_file(config.run_dir / "export" / "model.safetensors")["fc.weight"]
    np.testing.assert_array_equal(exported, states[4])


# ------------------------------------------------------------------------------------- beginning anew and going on


def test_a_finished_run_is_not_touched(world, trained) -> None:
    config = Config.model_validate(yaml.safe_load((trained / "config.yaml").read_text()))
    before = (trained / "metrics.jsonl").stat().st_mtime_ns
    with pytest.raises(UserError, match="exists already / pass --resume"):
        train(world, config)
    assert train(world, config, resume=True) == run_folder.read_result(trained)
    assert (trained / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_run_that_was_moved_goes_on_where_it_lies(trained, tmp_path) -> None:
    """So do its data and target under other paths, whose content the checkpoints compare; not once it is finished."""
    folder = tmp_path / "elsewhere ü" / "renamed"
    folder.mkdir(parents=True)
    raw = yaml.safe_load((trained / "config.yaml").read_text())

    def check(old: str, new: str) -> None:
        (folder / "config.yaml").write_text(yaml.safe_dump(raw | {"target": raw["target"] | {"path": old}}))
        now = raw | {"runs_dir": str(folder.parent), "name": "renamed", "target": raw["target"] | {"path": new}}
        config = Config.model_validate(now | {"data": raw["data"] | {"train": "few.jsonl", "heldout": "other.jsonl"}})
        assert config.run_dir == folder and run_folder.check(folder, config, True) is None

    target = raw["target"]["path"]
    check(target, f"{target}/../{Path(target).name}")
    check(str(tmp_path / "gone"), target)
    with pytest.raises(UserError, match="begun with another config .target.path"):
        check(str(tmp_path), target)  # it is there, and another one
    (folder / "result.json").write_text("{}")
    with pytest.raises(UserError, match="begun with another config .data.heldout"):
        check(target, target)


@pytest.mark.parametrize(
    ("section", "change", "named"),
    [
        ("training", {"epochs": 13}, "training.epochs: 12 there, 13 here"),
        ("optimiser", {"learning_rate": 0.5}, "optimiser.learning_rate: 0.01 there, 0.5 here"),
        ("draft", {"taps": [1, 2]}, "draft.taps: [1, 2, 4] there, [1, 2] here"),
    ],
)
def test_another_config_is_refused_and_names_the_key(world, trained, section, change, named) -> None:
    raw = yaml.safe_load((trained / "config.yaml").read_text())
    raw[section] |= change
    with pytest.raises(UserError) as error:
        train(world, Config.model_validate(raw), resume=True)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.yaml", "", "is damaged: it holds no mapping"),
        ("config.yaml", "- a\n", "is damaged: it holds no mapping"),
        ("config.yaml", "a: [", "cannot read"),
        ("config.yaml", None, "holds checkpoints, and no config.yaml of a run"),
        ("provenance.json", "[]", "is damaged"),
        ("provenance.json", "{", "cannot read"),
        ("result.json", "[]", "is damaged"),
        ("export", None, "its export is gone"),
    ],
)
def test_a_damaged_run_folder_is_one_line(world, tmp_path, name, content, words) -> None:
    config = world.config(tmp_path)
    with run_folder.begin(config.run_dir, config, None, TODAY):
        pass
    for folder in ("checkpoints", "export"):
        (config.run_dir / folder).mkdir()
    if name != "provenance.json":
        (config.run_dir / "result.json").write_text("{}")
    if content is not None:
        (config.run_dir / name).write_text(content)
    elif name == "export":
        (config.run_dir / name).rmdir()
    else:
        (config.run_dir / name).unlink()
    before = sorted(config.run_dir.iterdir())
    with pytest.raises(UserError, match=words) as error:
        train(world, config, resume=True)
    assert "\n" not in str(error.value) and sorted(config.run_dir.iterdir()) == before


def test_killed_as_it_begins_a_run_knows_the_draft_that_it_was_to_start_from(world, tmp_path) -> None:
    config = world.config(tmp_path)
    begun = run_folder.begin(config.run_dir, config, "a draft", TODAY)
    with begun, pytest.raises(UserError, match="another process is writing there"):
        train(world, config, resume=True)
    assert run_folder.date_of(config.run_dir) == TODAY
    assert run_folder.init_from(config.run_dir, None) == "a draft"
    (config.run_dir / "config.yaml").unlink()
    assert run_folder.check(config.run_dir, config, resume=False) is None


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_a_loss_that_is_not_finite_ends_the_run(world, tmp_path, monkeypatch, what) -> None:
    real = trainer.train_step

    def train_step(*arguments):
        state, outcome = real(*arguments)
        return state, outcome._replace(**{what: np.float32(np.nan)})

    monkeypatch.setattr(trainer, "train_step", train_step)
    with pytest.raises(UserError, match=f"{what} is nan at step 0 / .* / target or data are not finite"):
        train(world, world.config(tmp_path))


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"draft": {"taps": [1, 2, 5]}}, e3.WiringError),
        ({"draft": {"taps": []}}, e3.WiringError),
        ({"draft": {"taps": "paper"}}, UserError),  # four blocks are too few for it
        ({"data": {"train": "absent.jsonl"}}, UserError),
        ({"data": {"heldout": "absent.jsonl"}}, UserError),
        ({"data": {"length": 8}}, UserError),  # shorter than any prompt
        # Needed only after training.
        ({"evaluation": {"count": 1, "prompts": "absent.jsonl"}}, UserError),
        ({"evaluation": {"count": 1, "prompts": "{few}"}}, UserError),  # its rows have no turns
        ({"evaluation": {"count": 1, "prompts": "{turns}"}}, UserError),  # and this target no tokenizer
        ({"tracking": {"to": ["wandb"]}}, UserError),
    ],
)
def test_a_mistake_does_not_use_up_the_name(world, tmp_path, monkeypatch, sections, error) -> None:
    if sections.get("data", {}).get("length"):
        long = write_rows(tmp_path / "long.jsonl", [([5] * 9, [6, 7])])
        sections = {"data": sections["data"] | {"train": long}}
    if prompts := sections.get("evaluation", {}).get("prompts"):
        (tmp_path / "turns.jsonl").write_text('{"turns": ["Hello"]}\n')
        prompts = prompts.format(few=world.few, turns=tmp_path / "turns.jsonl")
        sections = {"evaluation": sections["evaluation"] | {"prompts": prompts}}
    monkeypatch.setitem(sys.modules, "wandb", None)
    sys.modules.pop("eagle3_jax.training.trackers.wandb", None)
    with pytest.raises(error) as raised:
        train(world, world.config(tmp_path, **sections))
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def uninterrupted(world, tmp_path_factory) -> Path:
    """12 steps, evaluated every 2, checkpoints every 4."""
    config = world.config(tmp_path_factory.mktemp("uninterrupted"))
    train(world, config)
    assert len(read_metrics(config.run_dir)) == 12
    return config.run_dir


def test_a_run_with_ram_is_the_run_with_online(world, tmp_path, uninterrupted) -> None:
    config = world.config(tmp_path, training={"features": "ram"})
    train(world, config)
    rows = read_metrics(uninterrupted)
    assert any(row["full_acceptance"][0] > 0 for row in rows)
    for online, ram in zip(rows, read_metrics(config.run_dir), strict=True):
        assert ram["loss"] == pytest.approx(online["loss"], rel=1e-4)
        # Online, the target's choice is computed only where the draft may be right.
        assert ram["full_acceptance"] == online["full_acceptance"] and ram["simulated_tau"] == online["simulated_tau"]
        if "heldout" in online:
            assert ram["heldout"]["loss_first_step"] == pytest.approx(online["heldout"]["loss_first_step"], rel=1e-4)


def press_in(patch: pytest.MonkeyPatch, place: str, at: int) -> None:
    """Ctrl-C, as the terminal sends it, on the `at`-th call of a function of the trainer, before it does its work."""
    real, calls = getattr(trainer, place), iter(range(1, 1000))

    def pressed(*arguments):
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    patch.setattr(trainer, place, pressed)


@pytest.mark.parametrize(
    ("place", "call", "step"),
    [
        ("make_batch", 4, 4),  # evaluations on the way call it no more: they have their own
        ("train_step", 6, 6),
        ("_step_metrics", 7, 7),
        ("evaluate", 1, 2),
        ("_extra", 1, 2),
        ("progress", 12, 12),  # after the last step
        ("progress raises", 5, 5),
    ],
)
def test_interrupted_and_resumed_is_uninterrupted(world, tmp_path, uninterrupted, place, call, step) -> None:
    config = world.config(tmp_path)

    def progress(report: trainer.Report) -> None:
        if place.startswith("progress") and report.step == call:
            if place == "progress":
                signal.raise_signal(signal.SIGINT)
            else:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if not place.startswith("progress"):
            press_in(patch, place, call)
        with pytest.raises(KeyboardInterrupt, match=f"stopped at step {step} of 12 .* --resume"):
            train(world, config, progress=progress)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (config.run_dir / "checkpoints" / str(step)).is_dir() and len(read_metrics(config.run_dir)) == step
    said, compiled = [], (trainer.train_step._cache_size(), trainer.evaluate_batch._cache_size())
    train(world, config, resume=True, say=said.append)
    assert f"resuming at step {step} of 12" in said
    assert (trainer.train_step._cache_size(), trainer.evaluate_batch._cache_size()) == compiled  # nothing again
    assert_same_run(config.run_dir, uninterrupted)


def test_a_run_of_an_older_version_goes_on(world, tmp_path, uninterrupted) -> None:
    """Its config lacks keys that came later, and has one that went, unset."""
    config = world.config(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(world, config, progress=lambda report: signal.raise_signal(signal.SIGINT))
    file = config.run_dir / "config.yaml"
    raw = yaml.safe_load(file.read_text())
    del raw["loss"], raw["optimiser"]["ema"], raw["training"]["accumulate"]
    raw["data"]["max_documents"] = None
    file.write_text(yaml.safe_dump(raw))
    other = config.model_copy(update={"training": config.training.model_copy(update={"accumulate": 2})})
    with pytest.raises(UserError, match=r"another config \(training.accumulate: 1 there, 2 here\)"):
        train(world, other, resume=True)
    said = []
    train(world, config, resume=True, say=said.append)
    assert "was begun before there was optimiser.ema, loss, training.accumulate: taken at the default" in said[0]
    assert_same_run(config.run_dir, uninterrupted)


def test_a_second_interrupt_is_obeyed_at_once(world, tmp_path, uninterrupted) -> None:
    config, real = world.config(tmp_path), trainer.train_step

    def pressed_twice(*arguments):
        if len(read_metrics(config.run_dir)) == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", pressed_twice)
        with pytest.raises(KeyboardInterrupt):
            train(world, config)
    assert "4" in [path.name for path in (config.run_dir / "checkpoints").iterdir()]
    train(world, config, resume=True)  # from step 4, so that the fifth line of the metrics is written anew
    assert_same_run(config.run_dir, uninterrupted)


def test_interrupted_while_exporting(world, tmp_path, uninterrupted) -> None:
    config = world.config(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        press_in(patch, "save_draft", 1)
        with pytest.raises(KeyboardInterrupt):
            train(world, config)
    assert not (config.run_dir / "result.json").exists()
    train(world, config, resume=True)
    assert_same_run(config.run_dir, uninterrupted)


def test_sigterm_saves_and_ends(world, tmp_path, uninterrupted) -> None:
    config = world.config(tmp_path)

    def progress(report: trainer.Report) -> None:
        if report.step == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="stopped at step 3"):
        train(world, config, progress=progress)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    train(world, config, resume=True)
    assert_same_run(config.run_dir, uninterrupted)


# Kills its own process as soon as orbax has begun to write checkpoint 8.
KILLED_IN_A_SAVE = """
import os, signal, sys, threading
from pathlib import Path
from eagle3_jax.cli.main import main
folder = Path(sys.argv[1])
def watch():
    while not any(path.name.startswith("8.orbax-checkpoint-tmp") for path in folder.glob("8*")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
sys.setswitchinterval(1e-5)
main(["train", "--config", sys.argv[2]])
"""


@pytest.mark.slow
def test_killed_inside_a_save_and_resumed(world, tmp_path, uninterrupted) -> None:
    config = world.config(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(run_folder.plain(config)))
    numerics = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # as in tests
    cache = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    command = [sys.executable, "-c", KILLED_IN_A_SAVE, config.run_dir / "checkpoints", file]
    killed = subprocess.run(command, env=os.environ | numerics | cache, cwd=REPO, capture_output=True, timeout=600)
    assert killed.returncode == -signal.SIGKILL and not (config.run_dir / "result.json").exists()
    said = []
    train(world, config, resume=True, say=said.append)
    assert any(line.startswith("resuming at step") for line in said)
    assert_same_run(config.run_dir, uninterrupted)


def test_the_best_is_saved_when_it_is_found(world, tmp_path) -> None:
    """Even between checkpoints: a crash after it must not lose it."""
    config = world.config(tmp_path, training={"epochs": 2, "evaluate_every": 2, "checkpoint_every": 100})
    taus, real = iter([1.2, 1.7, 1.4, 1.3]), trainer.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "evaluate", lambda run, state: real(run, state) | {"simulated_tau": next(taus)})
        assert train(world, config)["step"] == 4
    assert sorted(path.name for path in (config.run_dir / "checkpoints").iterdir()) == ["4", "8"]


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_at_once(world, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="checkpoints need .* GB are free"):
        train(world, world.config(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_run_without_evaluation_is_the_same_run(world, tmp_path, uninterrupted) -> None:
    config = world.config(tmp_path, training={"evaluate_every": 1000, "checkpoint_every": 1000})
    train(world, config)
    losses = [[row["loss_by_step"] for row in untimed(run)] for run in (config.run_dir, uninterrupted)]
    assert losses[0] == losses[1]
    for got, expected in zip(final_state(config.run_dir), final_state(uninterrupted), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("what", ["data", "target"])
def test_a_run_does_not_go_on_with_other_inputs(world, tmp_path, what) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(Path(world.few).read_text())
    config = world.config(tmp_path, data={"train": str(data)})
    with pytest.raises(KeyboardInterrupt):
        train(world, config, progress=lambda report: signal.raise_signal(signal.SIGINT))
    target = world.target
    if what == "data":
        write_rows(data, [([40 + i % 8], list(range(8, 48))) for i in range(8)])
    else:
        params = jax.tree.map(lambda a: a + 1, world.target.params)
        target = e3.Target(target.path, target.config, target.graph, params, None, target.eos_token_ids, None)
    with pytest.raises(UserError, match=f"another {'d2t, train' if what == 'data' else 'target'} /"):
        trainer.train(config, resume=True, target=target)


# --------------------------------------------------------------------------------------- time budget, init_from


def test_minutes_end_the_run_in_time_and_the_schedule_with_it(world, tmp_path) -> None:
    config, now, rates = world.config(tmp_path, training={"epochs": 100, "minutes": 2.0}), [100.0], []
    real = trainer.train_step

    def seven_seconds(setup, frozen, state, batch, features, rate):
        now[0] += 7.0
        rates.append(float(rate))
        return real(setup, frozen, state, batch, features, rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", seven_seconds)
        patch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        reports = []
        result = train(world, config, progress=reports.append)
    assert len(rates) == result["total_steps"] == 18  # 17 * 7 < 120 <= 18 * 7
    assert max(rates) == rates[2] > 0.95 and rates[-1] < 0.02 and rates[2:] == sorted(rates[2:], reverse=True)
    assert reports[-1].progress >= 1 and reports[8].progress == pytest.approx(63 / 120)


def test_the_seconds_before_an_interruption_count(world, tmp_path) -> None:
    config, now, steps = world.config(tmp_path, training={"epochs": 100, "minutes": 1.0}), [0.0], []
    real = trainer.train_step

    def ten_seconds(*arguments):
        now[0] += 10.0
        steps.append(now[0])
        if len(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", ten_seconds)
        patch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        with pytest.raises(KeyboardInterrupt):
            train(world, config)
        now[0] = 5000.0
        train(world, config, resume=True)
    assert len(steps) == 6


def test_init_from_keeps_weights_and_vocabulary(world, trained, tmp_path) -> None:
    config = world.config(tmp_path)
    run = trainer.prepare(config, config.run_dir, world.target, str(trained / "export"), lambda line: None)
    run.checkpoints.close()
    exported = e3.load_draft(trained / "export")
    np.testing.assert_array_equal(run.draft.d2t, exported.d2t)
    np.testing.assert_array_equal(run.draft.params["fc"]["weight"], exported.params["fc"]["weight"])
    assert len(run.draft.d2t) == 40


def test_init_from_goes_on_learning(world, trained, tmp_path) -> None:
    config = world.config(tmp_path, training={"epochs": 1})
    train(world, config, init_from=str(trained / "export"))
    assert read_metrics(config.run_dir)[0]["loss"] < 0.7 * read_metrics(trained)[0]["loss"]
    assert run_folder.init_from(config.run_dir, None) == str(trained / "export")  # without being told again
    with pytest.raises(UserError, match="was begun with --init-from"):
        run_folder.init_from(config.run_dir, "another")
    np.testing.assert_array_equal(e3.load_draft(config.run_dir / "export").d2t, e3.load_draft(trained / "export").d2t)


def test_init_from_that_contradicts_the_config(world, trained, tmp_path) -> None:
    with pytest.raises(e3.WiringError, match="expected .*block 1 input.* got"):
        train(world, world.config(tmp_path, draft={"taps": [2, 1, 4]}), init_from=str(trained / "export"))
    with pytest.raises(UserError, match="differs from the config's draft in draft_vocab_size"):
        train(world, world.config(tmp_path, draft={"vocab_size": 20}), init_from=str(trained / "export"))
    with pytest.raises(UserError):
        train(world, world.config(tmp_path), init_from=str(tmp_path / "absent"))

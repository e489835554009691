"""Checkpoints: the newest and the best are kept, the wiring is compared first, a full disk ends in one line."""

import contextlib
import json
import resource
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.errors import UserError
from eagle3_jax.taps import TapSet, WiringError
from eagle3_jax.training.checkpoints import Checkpoints, stated
from eagle3_jax.training.run_folder import Metrics, write_json


def facts_of(taps: TapSet, d2t: np.ndarray, target: str) -> dict:
    """As `wiring_facts` makes them, without a draft and data."""
    return {"taps": list(taps), "d2t": d2t.tobytes().hex(), "target": target}


FACTS = facts_of(TapSet([1, 2, 3]), np.arange(5), "abc")


def test_options_that_are_added_later_change_no_fact(tiny_draft) -> None:
    @dataclass(frozen=True)
    class Before:
        size: int
        taps: TapSet

    @dataclass(frozen=True)
    class Now(Before):
        added: bool = False

    taps = TapSet([2, 1])
    assert stated(Before(3, taps)) == stated(Now(3, taps)) == {"size": 3, "taps": [2, 1]} != stated(Now(3, taps, True))
    facts = stated(tiny_draft.config)
    assert facts["decoder"]["hidden_size"] == 64 and json.loads(json.dumps(facts)) == facts


def state_of(value: float) -> dict:
    return {"weight": jnp.full((3, 4), value), "step": jnp.asarray(int(value), jnp.int32)}


@pytest.fixture
def opened():
    """`opened(folder, facts)` is a Checkpoints that is closed after the test."""
    made = []

    def make(folder, facts=FACTS) -> Checkpoints:
        made.append(Checkpoints(folder, facts))
        return made[-1]

    yield make
    for checkpoints in made:
        checkpoints.close()


def test_state_and_extra_come_back(opened, tmp_path) -> None:
    assert opened(tmp_path).latest is None and opened(tmp_path).best_step() is None
    opened(tmp_path).save(3, state_of(3), {"seconds": 1.5, "heldout": {"simulated_tau": 1.2}}, 1.2)
    state, extra, step = opened(tmp_path).restore(state_of(0))
    assert step == 3 and extra == {"seconds": 1.5, "heldout": {"simulated_tau": 1.2}}
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(3)), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype


def test_the_newest_and_the_best_are_kept_across_restarts(opened, tmp_path) -> None:
    for step, tau in ((1, 1.1), (2, 1.5), (3, 1.3), (4, None), (5, 1.2)):
        opened(tmp_path).save(step, state_of(step), {}, tau)  # anew each time, as after an interruption
    checkpoints = opened(tmp_path)
    assert (checkpoints.latest, checkpoints.best_step()) == (5, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "5"]
    assert float(checkpoints.restore(state_of(0), 2)[0]["weight"][0, 0]) == 2.0


def test_more_of_the_newest_on_request(tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path, FACTS, keep=2)
    for step, tau in ((1, 1.5), (2, 1.1), (3, None), (4, 1.2)):
        checkpoints.save(step, state_of(step), {}, tau)
    assert checkpoints.best_tau == 1.5
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3", "4"]


def test_a_checkpoint_without_tau_is_newest_but_not_best(opened, tmp_path) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(1, state_of(1), {}, 1.1)
    checkpoints.save(2, state_of(2), {}, None)
    assert (checkpoints.latest, checkpoints.best_step()) == (2, 1)


def test_of_equals_the_later_is_the_best(opened, tmp_path) -> None:
    checkpoints = opened(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state_of(step), {}, 1.1)
    assert checkpoints.best_step() == 2


def test_a_step_is_saved_once(opened, tmp_path) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(1, state_of(1), {}, 1.1)
    checkpoints.save(1, state_of(9), {}, 1.1)
    assert float(checkpoints.restore(state_of(0))[0]["weight"][0, 0]) == 1.0


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ((TapSet([2, 1, 3]), np.arange(5), "abc"), WiringError, "expected .* got"),
        ((TapSet([1, 2]), np.arange(5), "abc"), WiringError, "expected .* got"),
        ((TapSet([1, 2, 3]), np.arange(5)[::-1], "abc"), UserError, "another d2t /"),
        ((TapSet([1, 2, 3]), np.arange(5), "xyz"), UserError, "another target /"),
        ((TapSet([1, 2, 3]), np.arange(4), "xyz"), UserError, "another d2t, target /"),
    ],
)
def test_other_wiring_is_refused_before_anything_is_restored(opened, tmp_path, facts, error, words) -> None:
    opened(tmp_path).save(1, state_of(1), {}, 1.1)
    taps, d2t, fingerprint = facts
    with pytest.raises(error, match=words) as raised:
        opened(tmp_path, facts_of(taps, d2t, fingerprint)).restore(template=None)  # fits nothing
    assert "\n" not in str(raised.value)


def test_torn_checkpoints_are_one_line(opened, tmp_path) -> None:
    opened(tmp_path).save(1, state_of(1), {}, 1.1)
    (tmp_path / "1" / "facts" / "metadata").write_text("[]")
    with pytest.raises(UserError, match="checkpoint 1 cannot be read"):
        opened(tmp_path).restore(state_of(0))
    for file in (tmp_path / "1" / "facts").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match="checkpoint 1 cannot be read"):
        opened(tmp_path).restore(state_of(0))
    for file in (tmp_path / "1" / "metrics").iterdir():
        file.write_bytes(b"")
    with pytest.raises(UserError, match="a checkpoint cannot be read / .* / remove the damaged one"):
        opened(tmp_path)


def test_what_a_killed_save_left_is_not_a_checkpoint(opened, tmp_path) -> None:
    opened(tmp_path).save(1, state_of(1), {}, 1.1)
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    checkpoints = opened(tmp_path)
    assert checkpoints.latest == 1
    checkpoints.save(2, state_of(2), {}, 1.2)
    assert float(checkpoints.restore(state_of(0))[0]["weight"][0, 0]) == 2.0


@pytest.fixture
def no_room():
    """A context in which no file can grow beyond some bytes, so that writing fails as on a full disk."""

    @contextlib.contextmanager
    def limited(size: int):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited


@pytest.mark.parametrize("room", [16, 30_000])  # too little for the JSON files, and for the arrays alone
def test_a_full_disk_is_one_line_and_spares_what_is_there(opened, tmp_path, no_room, room) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(1, state_of(1), {}, 1.1)
    noise = {"weight": jax.random.normal(jax.random.key(0), (200, 1000)), "step": jnp.asarray(2)}
    said = "cannot write checkpoint 2 / .* / File too large / free space, --resume"
    with pytest.raises(UserError, match=said) as error, no_room(room):
        checkpoints.save(2, noise, {}, 1.2)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    again = opened(tmp_path)
    assert again.latest == 1 and float(again.restore(state_of(0))[0]["weight"][0, 0]) == 1.0


def test_other_files_on_a_full_disk(tmp_path, no_room) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    with pytest.raises(UserError, match="cannot write .*metrics.jsonl"), no_room(16):
        metrics.write({"step": 1, "loss": 0.123456789})
    write_json(tmp_path / "result.json", {"old": 1})
    with pytest.raises(UserError, match="cannot write .*result.json"), no_room(16):
        write_json(tmp_path / "result.json", {"new": "x" * 100})
    assert "old" in (tmp_path / "result.json").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "result.json"]


def test_metrics_after_the_restored_step_and_torn_lines_are_dropped(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    Metrics(path, 2).write({"step": 3, "again": True})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "again": true}\n'
    path.write_text('{"step": 1}\n{"st')
    Metrics(path, 5)
    assert path.read_text() == '{"step": 1}\n'

"""The time budget: passes over as many rows as it has room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.training.budget import Budget


def run(budget: Budget, first: float, later: float, start: tuple[int, float] = (0, 0.0)) -> tuple[int, float, list]:
    """Simulates a run whose new rows cost `first` seconds a step and seen ones `later`; steps, seconds, progress."""
    (step, elapsed), progress = start, []
    while step < (total := budget.total(step, elapsed)):
        progress.append(step / total)
        seconds = first if step < budget.pass_steps else later
        budget.observe(step, seconds, seconds - later)
        step, elapsed = step + 1, elapsed + seconds
    return step, elapsed, progress


def test_without_minutes_every_pass_has_all_rows() -> None:
    budget = Budget(3, 7, None)
    assert run(budget, 5.0, 1.0)[0] == 21 and budget.pass_steps == 7


def test_enough_time_for_everything() -> None:
    budget = Budget(3, 7, 1000.0)
    assert run(budget, 5.0, 1.0)[0] == 21 and budget.pass_steps == 7


@given(st.integers(1, 8), st.floats(1.0, 9.0), st.floats(0.5, 1.0), st.floats(60.0, 600.0))
def test_the_first_pass_leaves_time_for_the_others(passes, first, later, seconds) -> None:
    budget = Budget(passes, 10_000, seconds)
    steps, elapsed, progress = run(budget, first, later)
    one_row_more = first + (passes - 1) * later
    assert abs(steps - passes * budget.pass_steps) <= passes + one_row_more / later
    assert seconds - 2 * one_row_more <= elapsed <= seconds + first
    assert budget.pass_steps == pytest.approx(seconds / one_row_more, abs=2)
    assert progress == sorted(progress) and progress[-1] < 1


def test_progress_counts_steps_not_time() -> None:
    """The first pass takes most of the time but is one of five passes: the learning rate must not decay in it."""
    budget = Budget(5, 10_000, 1400.0)
    _, _, progress = run(budget, 10.0, 1.0)
    assert budget.pass_steps == pytest.approx(100, abs=1) and progress[90] == pytest.approx(0.18, abs=0.01)


def test_a_run_that_gets_slower_still_ends_in_time() -> None:
    budget = Budget(5, 10_000, 1400.0)
    step, elapsed = 0, 0.0
    while step < budget.total(step, elapsed):
        seconds = 10.0 if step < budget.pass_steps else 3.0
        budget.observe(step, seconds, seconds - 1.0 if step < budget.pass_steps else 0.0)
        step, elapsed = step + 1, elapsed + seconds
    assert elapsed <= 1410 and step < 5 * budget.pass_steps


def test_resumed_after_the_first_pass_was_cut() -> None:
    budget = Budget(5, 10_000, 1400.0, pass_steps=100)
    assert budget.total(300, 1200.0) == 500
    steps, elapsed, _ = run(budget, 10.0, 1.0, (300, 1200.0))
    assert (steps, elapsed) == (500, 1400.0) and budget.pass_steps == 100


def test_resumed_in_the_first_pass() -> None:
    """Before a step is timed, the progress, and so the learning rate, is what it was."""
    budget = Budget(5, 10_000, 1400.0, expected=500.0)
    assert budget.total(60, 700.0) == 500.0
    budget.observe(60, 10.0, 9.0)
    assert budget.total(61, 710.0) == pytest.approx(5 * (61 + (690 - 4 * 61) / 14))


def test_features_computed_again_after_a_resume_take_time() -> None:
    budget = Budget(5, 10_000, 1400.0, pass_steps=100, expected=500.0)
    budget.observe(300, 10.0, 9.0)
    assert budget.total(301, 1300.0) == pytest.approx(311)


def test_time_left_in_and_after_the_first_pass() -> None:
    budget = Budget(5, 100, None)
    assert budget.seconds_left(0, 0.0) == 0.0 and Budget(5, 100, 60.0).seconds_left(0, 20.0) == 40.0
    for step in range(150):
        seconds = 10.0 if step < 100 else 1.0
        budget.observe(step, seconds, seconds - 1.0)
        expected = 10.0 * max(99 - step, 0) + min(499 - step, 400)
        assert budget.seconds_left(step + 1, 0.0) == pytest.approx(expected)
    limited = Budget(5, 10_000, 1400.0)
    limited.observe(0, 10.0, 9.0)
    assert limited.seconds_left(1, 10.0) == pytest.approx(1390.0)


def test_no_time_left_is_the_end() -> None:
    assert Budget(5, 10, 60.0).total(7, 61.0) == 7

"""Costs corrected by rounds: which rounds count, and for how much."""

import pytest

from eagle3_jax.speculate.round_costs import RoundCosts
from eagle3_jax.speculate.strategy import PLAIN, parse_strategy

ONE, THREE = parse_strategy("chain:1"), parse_strategy("chain:3")


def costs() -> RoundCosts:
    return RoundCosts({PLAIN: 1.0, ONE: 1.2, THREE: 1.5})


def compare(known: RoundCosts, strategy, *said: float) -> None:
    for ratio in said:
        known.ran(strategy, ratio)
        known.ran(PLAIN, 1.0)


def test_kept_costs_hold_until_rounds_are_compared() -> None:
    assert dict(costs()) == {PLAIN: 1.0, ONE: 1.2, THREE: 1.5}
    assert dict(RoundCosts({PLAIN: 1.0, ONE: 0.7})) == {PLAIN: 1.0, ONE: 1.0}  # none is cheaper than a plain one


def test_a_cost_is_the_median_of_the_kept_one_and_the_newest_comparisons() -> None:
    known = costs()
    compare(known, ONE, 1.6)
    assert known[ONE] == pytest.approx(1.4)
    compare(known, ONE, 1.6, 1.62)
    assert known[ONE] == pytest.approx(1.6)
    compare(known, ONE, *[1.1] * 15)
    assert known[ONE] == pytest.approx(1.1) and known[PLAIN] == 1.0
    compare(known, ONE, *[0.9] * 15)
    assert known[ONE] == 1.0 and known[THREE] == 1.5


def test_a_round_that_was_stopped_for_a_while_counts_for_little() -> None:
    known = costs()
    compare(known, ONE, 1.2, 1.2, 30.0, 1.2, 0.01)
    assert known[ONE] == pytest.approx(1.2)
    compare(known, THREE, 30.0)  # even where it is the only one
    assert known[THREE] == pytest.approx(1.5 * (1 + 1.5) / 2)
    compare(known, THREE, 0.1)
    assert known[THREE] == pytest.approx(1.5 * (1 + 1.5) / 2)


@pytest.mark.parametrize(
    "rounds",
    [
        [(ONE, None), (PLAIN, 1.0)],
        [(ONE, 9.0), (PLAIN, None)],
        [(ONE, 9.0), (PLAIN, None), (PLAIN, 1.0)],
        [(ONE, None), (ONE, None), (PLAIN, 1.0)],
        [(PLAIN, 1.0), (ONE, 9.0), (THREE, 9.0), (ONE, 9.0)],
        [(PLAIN, 1.0), (PLAIN, 9.0)],
    ],
)
def test_only_a_plain_round_right_after_a_drafting_one_is_compared_with_it(rounds) -> None:
    known = costs()
    for strategy, seconds in rounds:
        known.ran(strategy, seconds)
    assert dict(known) == dict(costs())


def test_doubt_goes_with_comparisons() -> None:
    known = costs()
    doubts = [known.doubt(ONE)]
    for _ in range(20):
        compare(known, ONE, 1.2)
        doubts.append(known.doubt(ONE))
    assert doubts == sorted(doubts, reverse=True) and doubts[0] == 1.5 and 1 < doubts[-1] < 1.03
    assert known.doubt(THREE) == 1.5

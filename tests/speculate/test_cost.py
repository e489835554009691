"""The files of round costs: what is measured, once, and what becomes of damaged files and of others that measure."""

import json
import logging
import os

import pytest

from eagle3_jax.speculate import cost
from eagle3_jax.speculate.cost import known_costs
from eagle3_jax.speculate.strategy import PLAIN, Strategy, parse_strategy

MENU = [parse_strategy(s) for s in ("plain", "chain:1", "chain:3", "tree:3x4x12")]
COSTS = dict(zip(MENU, (1.0, 1.5, 2.0, 2.5), strict=True))


@pytest.fixture
def key(monkeypatch, tmp_path) -> dict:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return {"batch": 4, "of": "a test"}


def measured(strategies: list[Strategy]) -> dict[Strategy, float]:
    assert strategies[0] == PLAIN
    return {strategy: COSTS[strategy] for strategy in strategies}


def never(strategies: list[Strategy]):
    raise AssertionError(f"measured again: {strategies}")


def test_costs_are_measured_once_in_plain_rounds(key) -> None:
    assert known_costs(key, 144, MENU, measured) == COSTS == known_costs(key, 144, MENU, never)
    assert {path.suffix for path in cost.cost_folder(key).iterdir()} == {".json"}
    with pytest.raises(AssertionError):
        known_costs(key | {"of": "another"}, 144, MENU, never)


def test_servers_with_other_strategies_add_theirs(key) -> None:
    few, asked = MENU[:2], []

    def measure(strategies: list[Strategy]):
        asked.append(strategies)
        return measured(strategies)

    known_costs(key, 144, few, measured)
    assert known_costs(key, 144, MENU, measure) == COSTS and asked == [[PLAIN, *MENU[2:]]]
    assert known_costs(key, 144, few, never) == {s: COSTS[s] for s in few}
    assert known_costs(key, 144, MENU, never) == COSTS


def test_two_that_measure_at_the_same_time_lose_nothing(key) -> None:
    def measure(strategies: list[Strategy]):
        known_costs(key, 144, MENU[2:], measured)  # another process begins and ends meanwhile
        return measured(strategies)

    known_costs(key, 144, MENU[:2], measure)
    assert known_costs(key, 144, MENU, never) == COSTS


def test_a_cache_length_has_the_costs_of_the_nearest_one_that_is_near(key) -> None:
    known_costs(key, 144, MENU, measured)
    assert known_costs(key, 528, MENU, never) == COSTS == known_costs(key, 80, MENU, never)
    other = {strategy: 1.0 if strategy == PLAIN else 3.0 for strategy in MENU}
    assert known_costs(key, 1040, MENU, lambda strategies: {s: other[s] for s in strategies}) == other
    assert known_costs(key, 528, MENU, never) == other and known_costs(key, 272, MENU, never) == COSTS


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "1", '{"key": 1}', "\x00\xff", "[" * 100_000),
        *({"key": {"of": "another"}}, {"strategy": "chain:2"}, {"entries": "144"}, {"entries": 0}, {"entries": None}),
        *({"plain_rounds": float("nan")}, {"plain_rounds": -1}, {"plain_rounds": None}, {"plain_rounds": "x"}),
    ],
    ids=lambda content: str(content)[:20],
)
def test_a_file_that_cannot_be_used_is_told_and_replaced(key, content, caplog) -> None:
    known_costs(key, 144, MENU, measured)
    path = cost.cost_folder(key) / "144-chain_3.json"
    text = json.dumps(json.loads(path.read_text()) | content) if isinstance(content, dict) else content
    path.write_bytes(text.encode("latin-1"))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert known_costs(key, 144, MENU, measured) == COSTS
    ignored, measuring = caplog.messages
    assert "ignoring files of round costs" in ignored and "144-chain_3.json" in ignored
    assert "measuring what rounds of chain:3 cost at batch 4" in measuring
    assert known_costs(key, 144, MENU, never) == COSTS


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(key, tmp_path, caplog) -> None:
    (tmp_path / "eagle3_jax").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert known_costs(key, 144, MENU, measured) == COSTS
    assert "cannot keep the measured round costs" in caplog.text and os.listdir(tmp_path) == ["eagle3_jax"]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    return now


def test_each_case_runs_right_beside_the_first_one_and_the_median_of_their_ratios_counts(clock) -> None:
    """The machine is half as fast from the tenth run on, and every seventh takes three times as long."""
    ran, prepared = [], []

    def run(case: str) -> None:
        ran.append(case)
        compiling = 60.0 if ran.count(case) == 1 else 0.0
        slow = (2 if len(ran) > 10 else 1) * (3 if len(ran) % 7 == 0 else 1)
        clock[0] += compiling + {"a": 0.2, "b": 0.3, "c": 0.5}[case] * slow

    def prepare() -> None:
        prepared.append(len(ran))
        clock[0] += 0.05

    assert cost.compare_each(run, ["a", "b", "c"], prepare) == pytest.approx({"a": 1.0, "b": 1.5, "c": 2.5})
    assert "".join(ran).startswith("abc" + "abac" + "baca" + "abac") and prepared == list(range(len(ran)))
    assert cost.compare_each(run, ["a"]) == {"a": 1.0}


def test_slow_cases_have_fewer_turns(clock) -> None:
    ran = []

    def run(case: str) -> None:
        ran.append(case)
        clock[0] += 15.0

    assert cost.compare_each(run, ["a", "b"]) == {"a": 1.0, "b": 1.0} and len(ran) == 2 + 3 * 2

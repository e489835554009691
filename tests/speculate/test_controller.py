"""Strategy `auto`: the policy on made-up costs, texts and acceptance while strategies change."""

import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.speculate import controller
from eagle3_jax.speculate import generate as generating
from eagle3_jax.speculate.controller import (
    Controller,
    choose,
    expected_tokens,
    trained_acceptance,
    tree_rate,
    worthwhile,
)
from eagle3_jax.speculate.round import catch_up, prefill, speculate
from eagle3_jax.speculate.round_costs import RoundCosts
from eagle3_jax.speculate.strategy import PLAIN, Strategy, parse_strategy
from tests.tiny import bigram_draft, bigram_target, not_a_number

MENU = [parse_strategy(s) for s in ("plain", "chain:1", "chain:2", "chain:3", "chain:5", "tree:3x4x12")]
DRAFTING = MENU[1:]
# Seconds a round in plain steps: one stream on a CPU without bf16, eight of them there, one on an accelerator.
CPU, CPU_8, GPU = ([1.0, 1.1, 1.24, 1.32, 1.6, 2.2], [1.0, 1.9, 2.4, 3.0, 4.0, 6.0], [1.0, 1.1, 1.15, 1.2, 1.3, 1.3])


def table(costs: list[float]) -> dict[Strategy, float]:
    return dict(zip(MENU, costs, strict=True))


def tokens(rate: float, of_trees: float | None = None) -> dict[Strategy, float]:
    """Expected of a round of each strategy, where drafts are right at this rate, those of trees at another."""
    return {s: expected_tokens(s.depth, [rate if s.is_chain else of_trees or rate] * s.depth) for s in DRAFTING}


# --- the policy


def test_expected_tokens_are_those_of_independent_levels() -> None:
    assert expected_tokens(3, [0.5, 0.4, 0.2]) == pytest.approx(1 + 0.5 + 0.2 + 0.04)
    assert expected_tokens(1, [0.5, 0.4]) == 1.5 and expected_tokens(0, []) == 1


@pytest.mark.parametrize(
    ("costs", "rate", "expected"),
    [
        *((CPU, 0.05, "plain"), (CPU, 0.11, "plain"), (CPU, 0.3, "chain:1"), (CPU, 0.75, "chain:3")),
        *((CPU, 1.0, "chain:5"), (CPU_8, 0.8, "plain"), (CPU_8, 1.0, "chain:5"), (GPU, 0.05, "plain")),
        *((GPU, 0.5, "chain:3"), (GPU, 0.9, "chain:5")),
    ],
)
def test_the_choice_is_the_most_tokens_a_second_or_plain(costs, rate: float, expected: str) -> None:
    assert choose(table(costs), tokens(rate)).text == expected


def test_a_tree_is_chosen_where_its_acceptance_pays() -> None:
    assert choose(table(GPU), tokens(0.5, of_trees=0.7)).text == "tree:3x4x12"
    assert choose(table(CPU), tokens(0.5, of_trees=0.7)).text == "chain:3"


def test_what_never_gains_is_not_worth_having() -> None:
    assert [s.text for s in worthwhile(table(CPU))] == ["plain", "chain:1", "chain:3", "chain:5"]
    assert [s.text for s in worthwhile(table(CPU_8))] == ["plain", "chain:2", "chain:5"]
    for costs in (CPU, CPU_8, GPU):
        kept = worthwhile(table(costs))
        for rate in np.linspace(0, 1, 41):
            speeds = {s: expected_tokens(s.depth, [tree_rate(rate, s)] * 5) / table(costs)[s] for s in MENU}
            assert max(speeds[s] for s in kept) > 0.97 * max(speeds.values()), (costs, rate)
    dear = table([1.0, 2.0, 3.0, 4.0, 6.0, 4.0])
    assert list(worthwhile(dear)) == [PLAIN] and Controller(5).next(RoundCosts(worthwhile(dear))) == PLAIN


def simulate(
    costs: list[float], rate, rounds: int, batch: int = 1, trained=None, kept: list[float] | None = None, seed: int = 0
) -> tuple[float, list[str]]:
    """Tokens a second against plain decoding, drafts being right with probability rate(round), and what was chosen.

    kept: what rounds cost by the files. They take as long as they truly cost, give or take some percent, on a machine
    that slowly becomes half as fast and again as fast as it was; one in twenty takes three times as long.
    """
    policy, rng, true = Controller(5, trained), np.random.default_rng(seed), table(costs)
    known = RoundCosts(table(kept or costs))
    spent, committed, chosen, newest = 0.0, 0, [], None
    for i in range(rounds):
        strategy = policy.next(known)
        right = rng.random((batch, max(strategy.depth, 1))) < tree_rate(rate(i), strategy)
        accepted = np.cumprod(right, axis=1).sum(axis=1) if strategy.depth else np.zeros(batch, int)
        policy.observe(strategy, accepted.tolist())
        catching_up = newest == PLAIN and strategy.depth > 0
        slowness = 2 ** (0.5 - 0.5 * np.cos(2 * np.pi * i / 1000)) * (3 if rng.random() < 0.05 else 1)
        seconds = true[strategy] * slowness * np.exp(0.07 * rng.standard_normal())
        known.ran(strategy, None if catching_up else seconds)
        spent, committed = spent + true[strategy] + 0.1 * catching_up, committed + np.mean(accepted + 1)
        newest = strategy
        chosen.append(strategy.text)
    return committed / spent, chosen


@pytest.mark.parametrize("costs", [CPU, CPU_8, GPU], ids=["cpu", "cpu at batch 8", "accelerator"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("trained", [None, [0.5, 0.5, 0.5]])
def test_never_much_slower_than_plain_and_as_fast_as_the_best(costs, batch: int, trained) -> None:
    for rate in (0.0, 0.1, 0.5, 1.0):
        rounds = 200 if trained else 120
        speeds = [simulate(costs, lambda i: rate, rounds, batch, trained, seed=seed)[0] for seed in (0, 1)]  # noqa: B023
        best = max(expected_tokens(s.depth, [tree_rate(rate, s)] * 5) / table(costs)[s] for s in MENU)
        assert min(speeds) >= 0.97, (rate, speeds)
        if trained is None or rate < 1:  # where training was far wrong, and probes are dear, they take longer
            assert np.mean(speeds) >= 0.85 * best, (rate, speeds, best)


def test_drafting_comes_back_when_it_pays_again() -> None:
    """Useless for 300 rounds, then good: rare probes find out, and cost next to nothing before."""
    _, chosen = simulate(CPU, lambda i: 0.0 if i < 200 else 0.8, 500)
    assert chosen[100:200].count("plain") >= 90 and chosen[450:].count("plain") <= 5
    speed, chosen = simulate(CPU, lambda i: 0.0, 600)
    assert 10 <= 500 - chosen[100:].count("plain") <= 40 and speed >= 0.99


DEAR, CHEAP, MIXED, OTHERWISE = (1.5,) * 5, (1 / 1.5,) * 5, (1.5, 1 / 1.5) * 2 + (1.5,), (1 / 1.5, 1.5) * 2 + (1 / 1.5,)


def corrected(
    costs: list[float], wrong: tuple[float, ...], rate: float, rounds: int, seeds: int
) -> tuple[float, float]:
    """Speed against plain decoding, the least of some runs, and against the best strategy, their mean.

    wrong: factors that kept costs are wrong by.
    """
    kept = [1.0, *(cost * times for cost, times in zip(costs[1:], wrong, strict=True))]
    speeds = [simulate(costs, lambda i: rate, rounds, kept=kept, seed=seed)[0] for seed in range(seeds)]
    best = max(expected_tokens(s.depth, [tree_rate(rate, s)] * 5) / table(costs)[s] for s in MENU)
    return min(speeds), np.mean(speeds) / best


@pytest.mark.parametrize(
    ("costs", "wrong", "rate"),
    [(CPU_8, CHEAP, 0.5), (CPU, DEAR, 0.3), (GPU, MIXED, 0.02)],
    ids=["cheap", "dear", "mixed"],
)
def test_kept_costs_that_are_wrong_are_corrected_by_the_rounds_that_run(costs, wrong, rate: float) -> None:
    of_plain, of_best = corrected(costs, wrong, rate, rounds=500, seeds=1)
    assert of_plain >= 0.97 and of_best >= 0.9


@pytest.mark.parametrize("costs", [CPU, CPU_8, GPU], ids=["cpu", "cpu at batch 8", "accelerator"])
@pytest.mark.parametrize("wrong", [DEAR, CHEAP, MIXED, OTHERWISE], ids=["dear", "cheap", "mixed", "otherwise"])
def test_whatever_they_are_wrong_by(costs, wrong) -> None:
    speeds = {rate: corrected(costs, wrong, rate, rounds=1000, seeds=4) for rate in (0.02, 0.3, 0.75)}
    assert all(of_plain >= 0.96 and of_best >= 0.85 for of_plain, of_best in speeds.values()), speeds


def test_acceptance_is_counted_by_depth_and_fades() -> None:
    policy = Controller(5)
    assert policy.rates == pytest.approx([0.3] * 5)
    for _ in range(200):
        policy.observe(MENU[3], [3, 1])
    rates = policy.rates
    assert rates == pytest.approx([1, 0.5, 1, 1, 1], abs=0.08)  # untried depths follow
    for _ in range(100):
        policy.observe(MENU[1], [0, 0])
    assert policy.rates[0] < 0.05 and policy.rates[2] == pytest.approx(rates[2], abs=0.05)
    for _ in range(100):
        policy.observe(MENU[5], [3, 0])
    assert tree_rate(policy.rates[0], MENU[5]) == pytest.approx(0.5, abs=0.08) and policy.rates[0] < 0.45


def test_what_training_measured_is_the_first_guess(tiny_draft) -> None:
    import dataclasses

    def guess(facts) -> list[float] | None:
        return trained_acceptance(dataclasses.replace(tiny_draft, facts=facts))

    assert guess({"training": {"conditional_acceptance": [0.4, 0.3]}}) == [0.4, 0.3]
    for unusable in ({}, {"training": None}, {"training": {"conditional_acceptance": []}}):
        assert guess(unusable) is None
    for unusable in ([0.4, None], [2.0], "0.4", [float("nan")]):
        assert guess({"training": {"conditional_acceptance": unusable}}) is None
    assert Controller(5, [0.4, 0.3]).rates == pytest.approx([0.4, 0.35, 0.35, 0.35, 0.35])


# --- texts and acceptance while strategies change

VOCAB, NEW = 64, 60
PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 2], [60], list(range(20, 33))]
# Of the strategies of test_lossless.py, whose programs are these.
SCRIPT = ["chain:3", *["plain"] * 3, "chain:3", "tree:3x3x9", "chain:3", *["plain"] * 18, "chain:3", "plain"]


@pytest.fixture(scope="module")
def target() -> e3.Target:
    return bigram_target(VOCAB, context=0.5)


@pytest.fixture(scope="module")
def draft(target) -> e3.Draft:
    return bigram_draft(target, 0.1)


@pytest.fixture(scope="module")
def plain(target) -> list[e3.Result]:
    return e3.generate(target, None, PROMPTS, NEW, stop_token_ids=())


@pytest.fixture
def scripted(monkeypatch):
    """Rounds take the strategies of a list in turn, whatever the controller would choose."""

    def follow(script: list[str]) -> None:
        shapes = [parse_strategy(text) for text in script]
        monkeypatch.setattr(generating, "_costs", lambda *args: (dict.fromkeys(shapes, 1.0), args[-1]))
        turn = iter(shapes * 100)
        monkeypatch.setattr(Controller, "next", lambda self, costs: next(turn))

    return follow


def test_changing_strategies_in_the_middle_of_a_text_changes_nothing(target, draft, plain, scripted) -> None:
    scripted(SCRIPT)
    answers = e3.generate(target, draft, PROMPTS, NEW, "auto", stop_token_ids=())
    assert [a.tokens for a in answers] == [p.tokens for p in plain]
    ran = answers[0].strategies
    assert ran == (SCRIPT * 3)[: len(ran)] and len(ran) > len(SCRIPT)
    assert all(len(drafts) == 0 for drafts, s in zip(answers[0].drafts, ran, strict=True) if s == "plain")


def test_rounds_are_timed_where_nothing_else_runs_with_them(target, draft, scripted, monkeypatch) -> None:
    ran = []
    monkeypatch.setattr(RoundCosts, "ran", lambda self, strategy, seconds: ran.append((strategy, seconds)))
    scripted(SCRIPT)
    for _ in range(2):  # the first time compiles
        ran.clear()
        e3.generate(target, draft, PROMPTS, NEW, "auto", stop_token_ids=())
    unread = 0
    for strategy, seconds in ran:
        assert (seconds is None) == (unread > 0 and (strategy.depth > 0 or unread == 16))
        assert seconds is None or seconds > 0
        unread = 0 if strategy.depth else unread % 16 + 1
    assert {seconds is None for _, seconds in ran} == {True, False}


def test_drafts_after_a_pause_are_those_without_one(target, draft, scripted) -> None:
    """Plain rounds, fewer and more than the draft is left at once, and trees before: its cache misses nothing.

    The reference reads prompt and answer so far as one prompt, and drafts from there.
    """
    scripted(SCRIPT)
    paused = e3.generate(target, draft, PROMPTS, NEW, "auto", stop_token_ids=())
    compared = 0
    for prompt, answer in zip(PROMPTS, paused, strict=True):
        position = 1
        for accepted, drafts, strategy in zip(answer.accepted, answer.drafts, answer.strategies, strict=True):
            if strategy == "chain:3":
                text = (prompt + answer.tokens)[: len(prompt) + position - 1]
                alone = e3.generate(target, draft, [text] * 4, 6, strategy, stop_token_ids=())[0]
                assert (alone.drafts[0], alone.accepted[0]) == (drafts, accepted), (strategy, position)
                compared += 1
            position += accepted + 1
    assert compared >= 12


def test_auto_gives_the_plain_text_and_keeps_what_it_measured(target, draft, plain, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(controller, "_MENU", ("plain", "chain:3", "tree:3x3x9"))
    for which in (draft, bigram_draft(target, 5.0), not_a_number(draft)):
        answers = e3.generate(target, which, PROMPTS, NEW, "auto", stop_token_ids=())
        assert [a.tokens for a in answers] == [p.tokens for p in plain]
    files = {path.name for path in (tmp_path / "eagle3_jax" / "costs").glob("*/*")}
    assert files == {f"144-{name}.json" for name in ("chain_3", "tree_3x3x9")}
    sizes = [f._cache_size() for f in (prefill, speculate, catch_up)]
    mixed = [[1], [2] * 30, [3, 4], [5] * 7]
    for settings in ({"max_new_tokens": 50}, {"max_new_tokens": 9, "stop_token_ids": [1, 2, 3]}):
        e3.generate(target, draft, mixed, strategy="auto", **settings)
    assert [f._cache_size() for f in (prefill, speculate, catch_up)] == sizes  # after warm-up nothing is compiled


def test_auto_needs_a_draft(target) -> None:
    with pytest.raises(e3.UserError, match="strategy auto needs a draft"):
        e3.generate(target, None, PROMPTS, strategy="auto")

"""Strategy `auto`: which strategy the next round has, from what drafts were worth lately and what rounds cost here.

    expected tokens of a round   1 + a1 + a1 a2 + ..., a_d: how often the draft token at depth d was right where the
                                 one before it was (as in training's conditional acceptance), lately
    choice                       most expected tokens a second; plain decoding unless drafting gains 2 %
    while plain                  now and then one round drafts, so that drafting can come back

A round has one strategy for all its requests, and their acceptance is counted together.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence

from eagle3_jax.draft.draft import Draft
from eagle3_jax.speculate.strategy import PLAIN, Strategy, parse_strategy

Rates = Sequence[float]  # conditional acceptance by depth

_MENU = ("plain", "chain:1", "chain:2", "chain:3", "chain:5", "tree:3x4x12")  # few: each is a compiled program
_GAIN = 1.02  # what drafting must promise: costs are measured to a percent or two
_PROBES = 0.005  # share of the time that probes may cost
_MEMORY = 0.98  # weight of a count after one more: the last fifty decide
_GUESS = 0.3  # acceptance before anything is known
_PULL, _TRAINED = 2.0, 2.0  # counts that guesses and what training measured stand for
_STEP = 5  # percent of acceptance between those at which strategies are compared
_SEVERAL = 1.5  # a level of a tree is wrong as often as a chain's would be to this power


def menu(draft: Draft) -> list[Strategy]:
    """The strategies that `auto` chooses from, plain decoding first."""
    return [s for s in map(parse_strategy, _MENU) if s.top_k <= draft.config.draft_vocab_size]


def trained_acceptance(draft: Draft) -> Rates | None:
    """Conditional acceptance on held-out answers that a draft's training has noted, if it has."""
    facts = draft.facts.get("training")
    rates = facts.get("conditional_acceptance") if isinstance(facts, dict) else None
    usable = isinstance(rates, list) and rates and all(isinstance(r, float | int) and 0 <= r <= 1 for r in rates)
    return [float(rate) for rate in rates] if usable else None


def expected_tokens(depth: int, rates: Rates) -> float:
    """Tokens that a round of `depth` levels commits on average."""
    return 1.0 + sum(itertools.accumulate(rates[:depth], operator.mul))


def choose(costs: Mapping[Strategy, float], acceptance: Mapping[Strategy, Rates]) -> Strategy:
    """The strategy of the most tokens a second; plain if the best other one promises less than 2 % more.

    costs: of a round, in any unit. acceptance: of each strategy that drafts.
    """
    best = best_drafting(costs, acceptance)
    return best if _speed(best, costs, acceptance) > _GAIN / costs[PLAIN] else PLAIN


def worthwhile(costs: Mapping[Strategy, float]) -> dict[Strategy, float]:
    """The costs of plain decoding and of the strategies that are worth having: each gains 2 % over the others at some
    acceptance, the same at every depth. The rest need not be compiled."""
    kept = {PLAIN: costs[PLAIN]}
    for percent in range(_STEP, 100 + _STEP, _STEP):
        acceptance = {s: [tree_rate(percent / 100, s)] * s.depth for s in costs}
        speeds = {s: _speed(s, costs, acceptance) for s in costs}
        best = max(speeds, key=speeds.get)
        if speeds[best] > _GAIN * max(speeds[s] for s in kept):
            kept[best] = costs[best]
    return kept


def best_drafting(costs: Mapping[Strategy, float], acceptance: Mapping[Strategy, Rates]) -> Strategy:
    """The strategy of the most tokens a second among those that draft."""
    return max(acceptance, key=lambda s: _speed(s, costs, acceptance))


def _speed(strategy: Strategy, costs: Mapping[Strategy, float], acceptance: Mapping[Strategy, Rates]) -> float:
    return expected_tokens(strategy.depth, acceptance[strategy]) / costs[strategy]


def probe_interval(costs: Mapping[Strategy, float], probe: Strategy) -> int:
    """Plain rounds between two probes, so that they cost no more than their share of the time."""
    return max(1, math.ceil((costs[probe] / costs[PLAIN] - 1) / _PROBES))


def tree_rate(rate: float, strategy: Strategy) -> float:
    """How often one of a level's candidates is right, where the likeliest is at `rate`."""
    return rate if strategy.is_chain else 1.0 - (1.0 - rate) ** _SEVERAL


class Controller:
    """The policy's state: how often the draft's likeliest tokens were right lately, by depth.

    A rate is pulled a little towards that of the depth above, so that a depth that was hardly tried has the rate of
    what led to it. trained: `trained_acceptance`. depth: that of the deepest strategy.

    Each round: `strategy = next(costs)`, then `observe(strategy, accepted)` with the counts of the running requests.
    The latter may come a round late, where rounds are dispatched ahead. costs may be others each time, as they are for
    another number of requests.
    """

    def __init__(self, depth: int, trained: Rates | None = None):
        known = list(trained or ())[:depth]
        padding = [0.0] * (depth - len(known))
        self._right = [rate * _TRAINED for rate in known] + padding
        self._tried = [_TRAINED] * len(known) + padding
        self._guess = known[0] if known else _GUESS
        self._plain_rounds = 0 if known else math.inf  # nothing is known: the first round is a probe
        self._break_even = 1.0  # tokens that the newest round must commit to be worth its time

    @property
    def rates(self) -> Rates:
        """How often the draft's likeliest token is right at each depth, those before it being right."""
        rates, above = [], self._guess
        for right, tried in zip(self._right, self._tried, strict=True):
            above = (right + _PULL * above) / (tried + _PULL)
            rates.append(above)
        return rates

    def next(self, costs: Mapping[Strategy, float]) -> Strategy:
        """The strategy of the next round. costs: of a round of each strategy that there is, in any unit."""
        if costs.keys() == {PLAIN}:
            return PLAIN
        rates = self.rates
        acceptance = {s: [tree_rate(rate, s) for rate in rates] for s in costs if s.depth}
        chosen = choose(costs, acceptance)
        if not chosen.depth:
            probe = best_drafting(costs, acceptance)
            if self._plain_rounds >= probe_interval(costs, probe):
                chosen = probe
        self._break_even = costs[chosen] / costs[PLAIN]
        return chosen

    def observe(self, strategy: Strategy, accepted: Sequence[int]) -> None:
        """What a round of `strategy` accepted, one number for each running request."""
        if not strategy.depth:
            self._plain_rounds += 1
            return
        # Of what a tree got right, the likeliest token was right in this share.
        shares = [rate / tree_rate(rate, strategy) if rate else 1.0 for rate in self.rates]
        for count in accepted:
            for d in range(min(count + 1, strategy.depth)):
                self._right[d] = self._right[d] * _MEMORY + (shares[d] if count > d else 0.0)
                self._tried[d] = self._tried[d] * _MEMORY + 1.0
        if 1 + sum(accepted) / len(accepted) <= self._break_even:  # else, while plain, the next round is a probe again
            self._plain_rounds = 0

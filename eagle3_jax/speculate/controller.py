"""Strategy `auto`: which strategy the next round has, from what drafts were worth lately and what rounds cost here.

    expected tokens of a round   1 + a1 + a1 a2 + ..., a_d: how often the draft token at depth d was right where the
                                 one before it was (as in training's conditional acceptance), lately
    choice                       most expected tokens a second; plain decoding unless drafting gains 5 %
    trial                        now and then a strategy runs twice and then a plain round: so drafting can come back,
                                 and what it costs is seen (`round_costs`). The strategy is the one that would be best
                                 if its cost were less, by as much as is possible after so few comparisons

A round has one strategy for all its requests, and their acceptance is counted together.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence

from eagle3_jax.draft.draft import Draft
from eagle3_jax.speculate.round_costs import RoundCosts
from eagle3_jax.speculate.strategy import PLAIN, Strategy, parse_strategy

Rates = Sequence[float]  # conditional acceptance by depth

_MENU = ("plain", "chain:1", "chain:2", "chain:3", "chain:5", "tree:3x4x12")  # few: each is a compiled program
_GAIN = 1.05  # what drafting must promise: costs are known to some percent
_WORTH = 1.02  # what a strategy must gain over the others to be compiled
_TRIALS = 0.003  # share of the time that trials may cost where costs are known
_CHANGE = 0.1  # what a change from plain rounds to drafting costs beside, in plain rounds: the draft catches up
_SOON = 2.0  # rounds between trials where drafting may be slower than plain decoding
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


def choose(costs: Mapping[Strategy, float], tokens: Mapping[Strategy, float]) -> Strategy:
    """The strategy of the most tokens a second; plain if the best other one promises less than 5 % more.

    costs: of a round, in any unit. tokens: expected of a round of each strategy that drafts.
    """
    best = best_drafting(costs, tokens)
    return best if tokens[best] / costs[best] > _GAIN / costs[PLAIN] else PLAIN


def best_drafting(costs: Mapping[Strategy, float], tokens: Mapping[Strategy, float]) -> Strategy:
    """The strategy of the most tokens a second among those that draft."""
    return max(tokens, key=lambda s: tokens[s] / costs[s])


def worthwhile(costs: Mapping[Strategy, float]) -> dict[Strategy, float]:
    """The costs of plain decoding and of the strategies that are worth having: each gains 2 % over the others at some
    acceptance, the same at every depth. The rest need not be compiled."""
    kept = {PLAIN: costs[PLAIN]}
    for percent in range(_STEP, 100 + _STEP, _STEP):
        speeds = {s: expected_tokens(s.depth, [tree_rate(percent / 100, s)] * s.depth) / costs[s] for s in costs}
        best = max(speeds, key=speeds.get)
        if speeds[best] > _WORTH * max(speeds[s] for s in kept):
            kept[best] = costs[best]
    return kept


def next_trial(costs: RoundCosts, tokens: Mapping[Strategy, float], chosen: Strategy) -> tuple[Strategy, float]:
    """What the next trial is to try, and rounds of the chosen strategy until then: so many that trials cost no more
    than their share of the time, which is greater while little is known of the cost. tokens: as for `choose`.

    While plain: what would be best, earlier if it may be cheaper than known. While drafting: what would be best if it
    were as cheap as it may be; but soon the chosen one, if plain decoding may be better for all that is known.
    """
    cheapest = {s: costs[s] / costs.doubt(s) for s in tokens}
    if not chosen.depth:
        tried = best_drafting(costs, tokens)
        lost = max(0.0, costs[tried] - tokens[tried]) + max(0.0, cheapest[tried] - tokens[tried])
    else:
        speed = tokens[chosen] / costs[chosen]  # tokens in the time of a plain round
        if speed < costs.doubt(chosen):
            return chosen, _SOON
        tried = best_drafting(cheapest, tokens)
        lost = 2 * max(0.0, costs[tried] - tokens[tried] / speed) + (1 - 1 / speed)
    share = _TRIALS * costs.doubt(tried) ** 2
    return tried, (lost + _CHANGE) / share / costs[chosen]


def tree_rate(rate: float, strategy: Strategy) -> float:
    """How often one of a level's candidates is right, where the likeliest is at `rate`."""
    return rate if strategy.is_chain else 1.0 - (1.0 - rate) ** _SEVERAL


class Controller:
    """The policy's state: how often the draft's likeliest tokens were right lately, by depth.

    A rate is pulled a little towards that of the depth above, so that a depth that was hardly tried has the rate of
    what led to it. trained: `trained_acceptance`. depth: that of the deepest strategy.

    Each round: `strategy = next(costs)`, then `observe(strategy, accepted)` with the counts of the running requests,
    and `costs.ran`. The latter two may come a round late, where rounds are dispatched ahead. costs may be others each
    time, as they are for another number of requests.
    """

    def __init__(self, depth: int, trained: Rates | None = None):
        known = list(trained or ())[:depth]
        padding = [0.0] * (depth - len(known))
        self._right = [rate * _TRAINED for rate in known] + padding
        self._tried = [_TRAINED] * len(known) + padding
        self._guess = known[0] if known else _GUESS
        self._rounds = 0 if known else math.inf  # since the last trial; nothing is known: begin with one
        self._coming: list[Strategy] = []  # rounds that are chosen, the next one last
        self._gains = 0.0  # tokens that rounds of a trial must commit to be better than plain ones
        self._good = False  # all of them did so far
        self._newest = None

    @property
    def rates(self) -> Rates:
        """How often the draft's likeliest token is right at each depth, those before it being right."""
        rates, above = [], self._guess
        for right, tried in zip(self._right, self._tried, strict=True):
            above = (right + _PULL * above) / (tried + _PULL)
            rates.append(above)
        return rates

    def next(self, costs: RoundCosts) -> Strategy:
        """The strategy of the next round. costs: of each strategy that there is."""
        if not self._coming:
            self._choose(costs)
        self._newest = self._coming.pop()
        return self._newest

    def _choose(self, costs: RoundCosts) -> None:
        """Puts the next round, or those of a trial, into `_coming`."""
        if costs.keys() == {PLAIN}:
            self._coming = [PLAIN]
            return
        rates = self.rates
        tokens = {s: expected_tokens(s.depth, [tree_rate(r, s) for r in rates[: s.depth]]) for s in costs if s.depth}
        chosen = choose(costs, tokens)
        tried, rounds = next_trial(costs, tokens, chosen)
        if self._rounds < rounds and (chosen.depth or not self._good):  # after a good trial the next comes at once
            self._coming = [chosen]
            self._rounds, self._good = self._rounds + 1, False
            return
        # After a plain round the draft has to catch up, so that the time of the round after that counts.
        self._coming = [PLAIN, tried, tried] if self._newest == PLAIN else [PLAIN, tried]
        self._rounds, self._gains, self._good = 0, costs[tried], True

    def observe(self, strategy: Strategy, accepted: Sequence[int]) -> None:
        """What a round of `strategy` accepted, one number for each running request."""
        if not strategy.depth:
            return
        # Of what a tree got right, the likeliest token was right in this share.
        shares = [rate / tree_rate(rate, strategy) if rate else 1.0 for rate in self.rates]
        for count in accepted:
            for d in range(min(count + 1, strategy.depth)):
                self._right[d] = self._right[d] * _MEMORY + (shares[d] if count > d else 0.0)
                self._tried[d] = self._tried[d] * _MEMORY + 1.0
        self._good = self._good and 1 + sum(accepted) / len(accepted) > self._gains

"""What rounds cost here and now: the kept costs (`cost`), corrected by the rounds that run.

Kept costs may be wrong: measured while another program had the machine, at another length of the caches, with another
fill of the batch. How fast a machine is changes by a factor of two within minutes, so that only a plain round right
after one that drafts tells what the latter costs in plain rounds. `controller` sees to it that such pairs come.

    cost   the median of the kept one and of the newest comparisons, and no less than a plain round

A median, so that what stops a single round for a while (another program, a page fault) counts for next to nothing.
"""

import statistics
from collections import deque
from collections.abc import Iterator, Mapping

from eagle3_jax.speculate.strategy import Strategy

_NEWEST = 15  # comparisons that count
_LEAST = 0.8  # of what one may say: no round is cheaper than a plain one, so that the latter was stopped for a while
_MOST = 1.5  # what one may say, in times of what is known
_WRONG = 1.5  # a kept cost may be so many times too high or too low


class RoundCosts(Mapping[Strategy, float]):
    """Costs of one kind of batch, in plain rounds, which `ran` keeps true.

    kept: of strategies that may run, plain decoding (1.0) among them.
    """

    def __init__(self, kept: Mapping[Strategy, float]):
        self._costs = {strategy: max(1.0, cost) for strategy, cost in kept.items()}
        self._said: dict[Strategy, deque[float]] = {}  # of strategies that were compared: what was known, comparisons
        self._compared = dict.fromkeys(kept, 0)
        self._before: tuple[Strategy, float] | None = None

    def __getitem__(self, strategy: Strategy) -> float:
        return self._costs[strategy]

    def __iter__(self) -> Iterator[Strategy]:
        return iter(self._costs)

    def __len__(self) -> int:
        return len(self._costs)

    def doubt(self, strategy: Strategy) -> float:
        """How many times more or less than known a round may cost; nearer to 1 with every comparison."""
        return _WRONG**0.5 ** self._compared[strategy]

    def ran(self, strategy: Strategy, seconds: float | None) -> None:
        """A round has run, right after the one told before. seconds: how long the device took; None if it was not the
        same as ever: another batch, or something else ran with it, such as its compilation, the draft's catching up or
        the reading of a prompt."""
        before, self._before = self._before, None if seconds is None else (strategy, seconds)
        if before is None or seconds is None or strategy.depth or not before[0].depth:
            return
        if (ratio := before[1] / seconds) >= _LEAST:
            self._compare(before[0], ratio)

    def _compare(self, strategy: Strategy, ratio: float) -> None:
        said = self._said.setdefault(strategy, deque([self._costs[strategy]], maxlen=_NEWEST))
        said.append(min(ratio, _MOST * self._costs[strategy]))
        self._compared[strategy] += 1
        self._costs[strategy] = max(1.0, statistics.median(said))

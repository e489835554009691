"""How long a run is: so many passes over the rows, or over as many rows as a time budget has room for.

Seeing a new row costs the target's forward (kept afterwards with `features: ram`), seeing it again only the draft's
step. So with a time budget the first pass goes on until what is left is just enough for the other passes, and a fast
machine trains on more text than a slow one, with the same number of passes.
"""

import statistics
from collections import deque

_RECENT = 20  # steps whose times count: old ones may be from a busier machine


class Budget:
    """Passes, steps a pass and seconds (None = no limit). `pass_steps`: how many steps each pass has.

    pass_steps is all rows until the first pass is cut short; a resumed run gives the number it had found, and the
    `expected` steps of the whole run, which stand until a step has been timed.
    """

    def __init__(
        self,
        passes: int,
        all_steps: int,
        seconds: float | None,
        pass_steps: int | None = None,
        expected: float | None = None,
    ):
        self.passes, self.all_steps, self.seconds = passes, all_steps, seconds
        self.pass_steps = all_steps if pass_steps is None else pass_steps
        self._expected = float(passes * self.pass_steps) if expected is None else expected
        self._first: deque[float] = deque(maxlen=_RECENT)
        self._later: deque[float] = deque(maxlen=_RECENT)

    def observe(self, step: int, seconds: float, of_features: float) -> None:
        """Times of step `step` (from 0): all of it, and its share for features that are kept.

        The first step of a call compiles: leave it out.
        """
        new = step < self.pass_steps
        if new:
            self._first.append(seconds)
        # After a resume, features are computed again in later passes: time that those passes do take.
        self._later.append(seconds - of_features if new else seconds)

    def total(self, step: int, elapsed: float) -> float:
        """Expected steps of the whole run after `step` steps and `elapsed` seconds; never less than `step`.

        Ends the first pass, by setting pass_steps, when the other passes need all that is left.
        """
        if self.seconds is None:
            return float(self.passes * self.pass_steps)
        left, others = self.seconds - elapsed, self.passes - 1
        if left <= 0:
            self.pass_steps = min(self.pass_steps, max(step, 1))
            return float(step)
        if not self._later:
            return max(self._expected, float(step))
        later = statistics.median(self._later)
        if 0 < step < self.pass_steps and self._first:
            more = (left - others * step * later) / (statistics.median(self._first) + others * later)
            if more >= 1:
                return float(self.passes * min(step + more, self.pass_steps))
            self.pass_steps = step
        return float(max(step, min(self.passes * self.pass_steps, step + left / later)))

    def seconds_left(self, step: int, elapsed: float) -> float:
        """Expected seconds to the end; before any step was timed, the limit's (0 without one)."""
        if not self._later:
            return max((self.seconds or 0.0) - elapsed, 0.0)
        total, later = self.total(step, elapsed), statistics.median(self._later)
        new = max(min(self.pass_steps, total / self.passes) - step, 0.0)
        return new * statistics.median(self._first or self._later) + (total - step - new) * later

"""The scheduler: who runs next. No arrays here, only requests and their order.

A request waits, reads its prompt chunk by chunk (prefill), then takes part in rounds until it ends. Between two rounds
at most `chunk` prompt tokens are read, so that a long prompt makes nobody wait for longer than that takes. A round is
one compiled program of one strategy: the requests of a strategy run together, the strategies take turns.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from eagle3_jax.serving.cache import Place, Slot, SlotCache
from eagle3_jax.serving.requests import Delta, Request


@dataclass(eq=False)
class Sequence:
    """A request in the engine. room: most new tokens. deliver: takes its Deltas. everything: its rounds need more than
    the greedy variant. bias: where there is a grammar, what the request adds to its logits, f32 [V]. allowed: the
    grammar's last mask, bool [V]. began: when it got its slot."""

    request: Request
    strategy: str
    stops: frozenset[int]
    room: int
    deliver: Callable[[Delta], None]
    slot: Slot | None = None
    tokens: list[int] = field(default_factory=list)
    everything: bool = False
    bias: np.ndarray | None = None
    allowed: np.ndarray | None = None
    cancelled: bool = False
    began: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """Read prompt tokens [start, stop) of a request."""

    sequence: Sequence
    start: int
    stop: int


@dataclass(frozen=True)
class Round:
    """One round of a strategy for these requests."""

    strategy: str
    sequences: list[Sequence]


class Scheduler:
    """waiting: not begun, in order of arrival. reading: prompts not read to the end. decoding: the others."""

    def __init__(self, cache: SlotCache, chunk: int):
        self.waiting: deque[Sequence] = deque()
        self.reading: deque[Sequence] = deque()
        self.decoding: list[Sequence] = []
        self._cache, self._chunk = cache, chunk
        self._spent = 0  # prompt tokens read since the last round
        self._last_turn: dict[str, int] = {}
        self._rounds = 0

    def __iter__(self) -> Iterable[Sequence]:
        return iter([*self.waiting, *self.reading, *self.decoding])

    @property
    def running(self) -> int:
        return len(self.reading) + len(self.decoding)

    def admit(self) -> list[tuple[Sequence, Place]]:
        """Gives free slots to those who wait, first come first served; returns them and their places.

        Who waits for a prompt that is being read, because its own begins as that does, is passed over meanwhile.
        """
        admitted = []
        for sequence in list(islice(self.waiting, len(self._cache.free))):
            if self._cache.awaits(sequence.request.prompt):
                continue
            self.waiting.remove(sequence)
            place = self._cache.take(sequence.request.prompt)
            sequence.slot = place.slot
            self.reading.append(sequence)
            admitted.append((sequence, place))
        return admitted

    def next(self) -> Chunk | Round | None:
        """What runs now; None if nothing can."""
        if self.reading:
            sequence = self.reading[0]
            start, size = sequence.slot.read, min(len(sequence.request.prompt) - sequence.slot.read, self._chunk)
            if not self.decoding or self._spent + size <= self._chunk:
                self.reading.rotate(-1)  # a short prompt waits for one chunk of a long one, not for all of it
                self._spent += size
                return Chunk(sequence, start, start + size)
        self._spent = 0
        if not self.decoding:
            return None
        groups: dict[str, list[Sequence]] = {}
        for sequence in self.decoding:
            groups.setdefault(sequence.strategy, []).append(sequence)
        strategy = min(groups, key=lambda name: self._last_turn.get(name, 0))
        self._rounds += 1
        self._last_turn[strategy] = self._rounds
        return Round(strategy, groups[strategy])

    def prompt_read(self, sequence: Sequence) -> None:
        """The first new token is there: from now on it decodes."""
        self.reading.remove(sequence)
        self.decoding.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A request has ended; its slot is free."""
        for place in (self.waiting, self.reading, self.decoding):
            if sequence in place:
                place.remove(sequence)
        if sequence.slot is not None:
            self._cache.give_back(sequence.slot)
            sequence.slot = None

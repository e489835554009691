"""The runner: compiled programs over the caches of all slots, and nothing that decides.

    set_sampling   a slot gets a request's settings
    copy           a slot's entries go to another slot
    read           a chunk of a prompt, filled up to 16, 32, ... tokens, goes into the caches of target and draft
    first          the first new token of a prompt that is read to the end
    round          one round of a strategy for some slots (`speculate.round`), the others untouched

A round is two programs, the reading by the models (`verify`) and the choice of tokens (`commit`). Both are compiled for
1, 2, 4, ... requests, the second in two variants: all greedy, nothing else wanted; and everything. A batch is filled up
with rows that the caches lack, which are read as any row and never written. `warm_up` compiles all there is, so that
nothing is compiled while serving.
"""

import time
from collections.abc import Sequence

import jax
import numpy as np

from eagle3_jax.draft.draft import Draft
from eagle3_jax.models.target import Target
from eagle3_jax.serving import programs
from eagle3_jax.serving.programs import LastRead, Outcome
from eagle3_jax.serving.strategies import slot_room
from eagle3_jax.speculate.cost import compare_each, cost_key, known_costs
from eagle3_jax.speculate.generate import pair
from eagle3_jax.speculate.request import SamplingParams, device_sampling
from eagle3_jax.speculate.round import must_catch_up
from eagle3_jax.speculate.round_costs import RoundCosts
from eagle3_jax.speculate.strategy import Strategy

_NARROW = 16  # fewest prompt tokens that a program is compiled for


class Runner:
    """The caches of `slots` rows for texts of max_len tokens, and the programs over them.

    strategies: those that `warm_up` compiles; rounds of others compile when they first run. costs: of a round of each,
    in plain ones, for each number of requests that rounds are compiled for; known after `warm_up` where there is a
    choice.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        slots: int,
        max_len: int,
        chunk: int,
        strategies: Sequence[Strategy],
    ):
        self.models, self.weights = pair(target, draft)
        self._target, self._draft, self._slots = target, draft, slots
        self._sizes = _doubled(1, slots)  # numbers of requests for which rounds are compiled
        self._widths = _doubled(_NARROW, min(chunk, max_len))  # prompt tokens that are read at once
        self.entries = max_len + slot_room(strategies)
        self._known = tuple(strategies)
        self.costs: dict[int, RoundCosts] = {}
        self._neutral = [True] * slots
        self._unread = np.zeros(slots + 1, np.int32)  # plain rounds of each slot that the draft has not read
        self._state = programs.empty(self.models, self.weights, target, draft, slots, self.entries)

    def warm_up(self) -> None:
        """Compiles every program there is, on rows that the caches lack, and finds out what rounds cost."""
        nowhere = self._slots
        self._set_row(nowhere, [0], SamplingParams(seed=0))
        self.set_bias(nowhere, np.zeros(self._target.config.vocab_size, np.float32))
        self.copy(nowhere, nowhere)
        for count in self._widths:
            last = self.read(nowhere, [0] * count, 0, count, 1)
        self.first(nowhere, last, 1, True)
        for size in self._sizes:
            if self.models.draft is not None:
                self._catch_up(np.full(size, nowhere, np.int32))
            for strategy in self._known:
                for everything in (False, True):
                    self.round(strategy, [nowhere] * size, [everything] * size, everything)
            if len(self._known) > 1:
                self.costs[size] = RoundCosts(self._measure(size))

    def _measure(self, size: int) -> dict[Strategy, float]:
        """What a greedy round of each strategy costs for `size` requests, the draft having read all that came before:
        what it reads after plain rounds is not a cost of every round that drafts."""
        nowhere = [self._slots] * size

        def run(strategy: Strategy) -> None:
            self.round(strategy, nowhere, [False] * size, False)

        def prepare() -> None:
            self._catch_up(np.asarray(nowhere, np.int32))
            jax.block_until_ready(self._state.length)

        # All programs are compiled here anyway, so that costs need not be those of caches of another length.
        key = cost_key(self._target, self._draft, size, ["slots", str(self._slots), "entries", str(self.entries)])
        return known_costs(key, self.entries, self._known, lambda shapes: compare_each(run, shapes, prepare))

    @property
    def intact(self) -> bool:
        """Whether the caches are there; a program that fails while it runs may have taken them along."""
        return not any(array.is_deleted() for array in jax.tree.leaves(self._state))

    def bucket(self, count: int) -> int:
        """For how many requests the round is compiled that `count` requests have."""
        return next(size for size in self._sizes if size >= count)

    def set_sampling(self, slot: int, prompt: Sequence[int], params: SamplingParams) -> bool:
        """Gives a slot a request's settings; returns whether it needs the variant with everything."""
        neutral = params.is_neutral
        if not (neutral and self._neutral[slot]):
            self._set_row(slot, prompt, params)
            self._neutral[slot] = neutral
        return not neutral

    def _set_row(self, slot: int, prompt: Sequence[int], params: SamplingParams) -> None:
        new = device_sampling(self._target, [prompt], [params], complete=True)
        sampling = programs.put(self.models.placement, self._state.sampling, _row(slot), new)
        self._state = self._state._replace(sampling=sampling)

    def set_bias(self, slot: int, bias: np.ndarray) -> None:
        """What is added to a slot's logits from now on, f32 [V]; -inf forbids a token."""
        if slot < self._slots:
            self._neutral[slot] = False
        sampling = self._state.sampling
        biases = programs.put(self.models.placement, sampling.bias, _row(slot), bias[None])
        self._state = self._state._replace(sampling=sampling._replace(bias=biases))

    def copy(self, source: int, slot: int) -> None:
        """Copies all entries of a slot to another one."""
        self._state = programs.copy(self.models.placement, self._state, _row(source), _row(slot))

    def read(self, slot: int, prompt: Sequence[int], start: int, stop: int, room: int) -> LastRead:
        """Reads tokens [start, stop) of a prompt, at most a chunk of them; those before are in the caches.

        What is read is filled up to one of few widths. room: most tokens that the answer may have.
        """
        size = next(width for width in self._widths if width >= stop - start)
        start = min(start, self.entries - size)  # what is padded must fit as well, so some are read once more
        ids, next_ids = np.zeros((1, size), np.int32), np.zeros((1, size), np.int32)
        ids[0, : stop - start] = prompt[start:stop]
        following = prompt[start + 1 : stop + 1]  # the newest token's is not known yet: its entry is written again
        next_ids[0, : len(following)] = following
        args = (ids, next_ids, _row(start), _row(stop - start), _row(len(prompt)), _row(len(prompt) + room))
        self._state, last = programs.read(self.models, self.weights, self._state, _row(slot), *args)
        return last

    def first(self, slot: int, last: LastRead, length: int, scored: bool) -> Outcome:
        """The first new token after a prompt of `length` tokens; `last`: what `read` returned for its end."""
        args = (_row(slot), last, _row(length), np.asarray([scored]))
        self._state, outcome = programs.first(self.models, self.weights, self._state, *args)
        self._unread[slot] = 0
        return jax.device_get(outcome)

    def round(
        self, strategy: Strategy, slots: Sequence[int], scored: Sequence[bool], everything: bool
    ) -> tuple[Outcome, float | None]:
        """One round for these slots, and its seconds, None if the draft had to catch up first. scored: who wants log
        probabilities. everything: anybody is not plainly greedy."""
        size = self.bucket(len(slots))
        # A batch of all slots is in their order, so that no row of a cache is copied (see `cached_where`).
        places = list(slots) if size == self._slots and max(slots) < size else list(range(len(slots)))
        rows, wanted = np.full(size, self._slots, np.int32), np.zeros(size, bool)
        rows[places], wanted[places] = slots, scored
        caught_up = self.models.draft is not None and must_catch_up(strategy, int(self._unread[slots].max()))
        if caught_up:
            self._catch_up(rows)
        if self.models.draft is not None:
            self._unread[slots] += not strategy.depth
        begun = time.perf_counter()
        self._state, verified = programs.verify(self.models, strategy, self.weights, self._state, rows)
        args = (self._state, verified, rows, wanted)
        self._state, outcome = programs.commit(self.models, strategy, everything, self.weights, *args)
        outcome = jax.tree.map(lambda x: x[places], jax.device_get(outcome))
        return outcome, None if caught_up else time.perf_counter() - begun

    def _catch_up(self, rows: np.ndarray) -> None:
        self._state = programs.catch_up(self.models, self.weights, self._state, rows)
        self._unread[rows] = 0

    def draft_lag(self, slot: int) -> int:
        """Newest entries of a slot that the draft's cache lacks."""
        return int(self._unread[slot])


def _doubled(first: int, last: int) -> list[int]:
    """first, twice that, ... up to `last`, and that itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def _row(number: int) -> np.ndarray:
    return np.asarray([number], np.int32)

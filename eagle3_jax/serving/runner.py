"""The runner: compiled programs over the caches of all slots, and nothing that decides.

    set_sampling   a slot gets a request's settings
    copy           a slot's entries go to another slot
    read           a chunk of a prompt goes into the caches of target and draft
    first          the first new token of a prompt that is read to the end
    round          one round of a strategy for some slots (`speculate.round`), the others untouched

A round is two programs, the reading by the models (`verify`) and the choice of tokens (`commit`). Both are compiled for
1, 2, 4, ... requests, the second in two variants: all greedy, nothing else wanted; and everything. A batch is filled up
with rows that the caches lack, which are read as any row and never written. `warm_up` compiles all there is, so that
nothing is compiled while serving.
"""

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.attention import KV, cached, empty_cache, put_rows, take_rows
from eagle3_jax.models.target import Target
from eagle3_jax.serving.strategies import slot_room
from eagle3_jax.sharding import Placement
from eagle3_jax.speculate.cost import cost_key, known_costs, time_each
from eagle3_jax.speculate.drafting import DraftState, extend, fast_rows
from eagle3_jax.speculate.generate import pair
from eagle3_jax.speculate.request import SamplingParams, device_sampling
from eagle3_jax.speculate.round import (
    UNREAD,
    Models,
    State,
    Verified,
    Weights,
    commit,
    must_catch_up,
    read_unread,
    verify,
)
from eagle3_jax.speculate.round_costs import RoundCosts
from eagle3_jax.speculate.sampling import choose, observe
from eagle3_jax.speculate.scores import Scores, scores, sound
from eagle3_jax.speculate.strategy import Strategy
from eagle3_jax.taps import LastHidden, Taps

_NARROW = 16  # prompt tokens read at once where there are no more


class LastRead(NamedTuple):
    """The newest token that was read: hidden state before the final norm, and what the draft reads (None without)."""

    hidden: Float[Array, "1 1 H"]
    taps: Taps | None


class Outcome(NamedTuple):
    """Of a round or a first token: tokens[b, : accepted[b] + 1] are new. sound: the target's logits were finite;
    finite: the draft's were."""

    tokens: Int[Array, "B levels"]
    accepted: Int[Array, "B"]
    sound: Bool[Array, "B"]
    finite: Bool[Array, "B"]
    scores: Scores | None


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
        self._chunk = min(chunk, max_len)
        self.entries = max_len + slot_room(strategies)
        self._known = tuple(strategies)
        self.costs: dict[int, RoundCosts] = {}
        self._neutral = [True] * slots
        self._unread = np.zeros(slots + 1, np.int32)  # plain rounds of each slot that the draft has not read
        self._state = _empty(self.models, self.weights, target, draft, slots, self.entries)

    def warm_up(self) -> None:
        """Compiles every program there is, on rows that the caches lack, and finds out what rounds cost."""
        nowhere = self._slots
        self._set_row(nowhere, [0], SamplingParams(seed=0))
        self.set_bias(nowhere, np.zeros(self._target.config.vocab_size, np.float32))
        self.copy(nowhere, nowhere)
        for count in sorted({min(_NARROW, self._chunk), self._chunk}):
            last = self.read(nowhere, [0] * count, 0, count, 1)
        self.first(nowhere, last, 1, True)
        for size in _buckets(self._slots):
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
        return known_costs(key, self.entries, self._known, lambda shapes: time_each(run, shapes, prepare))

    @property
    def intact(self) -> bool:
        """Whether the caches are there; a program that fails while it runs may have taken them along."""
        return not any(array.is_deleted() for array in jax.tree.leaves(self._state))

    def bucket(self, count: int) -> int:
        """For how many requests the round is compiled that `count` requests have."""
        return next(size for size in _buckets(self._slots) if size >= count)

    def set_sampling(self, slot: int, prompt: Sequence[int], params: SamplingParams) -> bool:
        """Gives a slot a request's settings; returns whether it needs the variant with everything."""
        neutral = params.is_neutral
        if not (neutral and self._neutral[slot]):
            self._set_row(slot, prompt, params)
            self._neutral[slot] = neutral
        return not neutral

    def _set_row(self, slot: int, prompt: Sequence[int], params: SamplingParams) -> None:
        new = device_sampling(self._target, [prompt], [params], complete=True)
        sampling = _put(self.models.placement, self._state.sampling, _row(slot), new)
        self._state = self._state._replace(sampling=sampling)

    def set_bias(self, slot: int, bias: np.ndarray) -> None:
        """What is added to a slot's logits from now on, f32 [V]; -inf forbids a token."""
        if slot < self._slots:
            self._neutral[slot] = False
        sampling = self._state.sampling
        biases = _put(self.models.placement, sampling.bias, _row(slot), bias[None])
        self._state = self._state._replace(sampling=sampling._replace(bias=biases))

    def copy(self, source: int, slot: int) -> None:
        """Copies all entries of a slot to another one."""
        self._state = _copy(self.models.placement, self._state, _row(source), _row(slot))

    def read(self, slot: int, prompt: Sequence[int], start: int, stop: int, room: int) -> LastRead:
        """Reads tokens [start, stop) of a prompt, at most a chunk of them; those before are in the caches.

        room: most tokens that the answer may have.
        """
        size = min(_NARROW, self._chunk) if stop - start <= _NARROW else self._chunk
        start = min(start, self.entries - size)  # what is padded must fit as well, so some are read once more
        ids, next_ids = np.zeros((1, size), np.int32), np.zeros((1, size), np.int32)
        ids[0, : stop - start] = prompt[start:stop]
        following = prompt[start + 1 : stop + 1]  # the newest token's is not known yet: its entry is written again
        next_ids[0, : len(following)] = following
        args = (ids, next_ids, _row(start), _row(stop - start), _row(len(prompt)), _row(len(prompt) + room))
        self._state, last = _read(self.models, self.weights, self._state, _row(slot), *args)
        return last

    def first(self, slot: int, last: LastRead, length: int, scored: bool) -> Outcome:
        """The first new token after a prompt of `length` tokens; `last`: what `read` returned for its end."""
        args = (_row(slot), last, _row(length), np.asarray([scored]))
        self._state, outcome = _first(self.models, self.weights, self._state, *args)
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
        self._state, verified = _verify(self.models, strategy, self.weights, self._state, rows)
        args = (self._state, verified, rows, wanted)
        self._state, outcome = _commit(self.models, strategy, everything, self.weights, *args)
        outcome = jax.tree.map(lambda x: x[places], jax.device_get(outcome))
        return outcome, None if caught_up else time.perf_counter() - begun

    def _catch_up(self, rows: np.ndarray) -> None:
        self._state = _catch_up(self.models, self.weights, self._state, rows)
        self._unread[rows] = 0

    def draft_lag(self, slot: int) -> int:
        """Newest entries of a slot that the draft's cache lacks."""
        return int(self._unread[slot])


def _buckets(slots: int) -> list[int]:
    """Numbers of requests for which rounds are compiled: powers of two up to `slots`, and that itself."""
    return [size for size in (1 << i for i in range(slots.bit_length())) if size < slots] + [slots]


def _row(number: int) -> np.ndarray:
    return np.asarray([number], np.int32)


def _empty(models: Models, weights: Weights, target: Target, draft: Draft | None, slots: int, entries: int) -> State:
    """The state of `slots` slots that hold nothing."""
    try:
        state = models.placement.made(lambda: _nothing(models, weights, target, draft, slots, entries))
        sampling = device_sampling(target, [[0]] * slots, [SamplingParams(seed=0)] * slots, complete=True)
    except jax.errors.JaxRuntimeError as error:
        why = str(error).splitlines()[0]
        raise UserError(
            f"no memory for {slots} slots of {entries} tokens / {why} / lower --slots or --max-len"
        ) from error
    return state._replace(sampling=models.placement.everywhere(sampling))


def _nothing(models: Models, weights: Weights, target: Target, draft: Draft | None, slots: int, entries: int) -> State:
    """`_empty` without the sampling."""
    decoder, known = target.config, None
    shape = (decoder.num_layers, slots, decoder.num_kv_heads, entries, decoder.head_dim)
    cache = empty_cache(*shape, target.dtype, decoder.value_dim)
    if draft is not None:
        shape, dtype = draft.config.decoder, weights.draft["lm_head"]["weight"].dtype
        own = empty_cache(shape.num_layers, slots, shape.num_kv_heads, entries, shape.head_dim, dtype)
        features = Taps(
            [jnp.zeros((slots, UNREAD, decoder.hidden_size), dtype) for _ in models.taps.points], models.taps
        )
        nothing = jnp.zeros((slots, UNREAD), jnp.int32), jnp.zeros(slots, jnp.int32)
        known = DraftState(own, jnp.zeros((slots, 1, shape.hidden_size), dtype), features, *nothing)
    reach = None if decoder.rope_border is None else jnp.ones(slots, jnp.int32)
    return State(cache, jnp.ones(slots, jnp.int32), jnp.zeros(slots, jnp.int32), known, None, reach)


def _part(state: State, rows: Int[Array, "B"], with_sampling: bool) -> State:
    """What a round of these rows takes: all of the caches, and the rows of everything else."""
    draft = state.draft
    small = state._replace(
        cache=(),
        draft=None if draft is None else draft._replace(cache=()),
        sampling=state.sampling if with_sampling else None,
    )
    part = take_rows(small, rows)._replace(cache=state.cache)
    return part if draft is None else part._replace(draft=part.draft._replace(cache=draft.cache))


def _joined(state: State, rows: Int[Array, "B"], part: State) -> State:
    """The state after a round of these rows. Of the sampling state only the counts of tokens change."""
    sampling, draft = state.sampling, None
    if part.sampling is not None:
        counts = put_rows(sampling.penalties.counts, rows, part.sampling.penalties.counts)
        sampling = sampling._replace(penalties=sampling.penalties._replace(counts=counts))
    if part.draft is not None:
        draft = put_rows(state.draft._replace(cache=()), rows, part.draft._replace(cache=()))
        draft = draft._replace(cache=part.draft.cache)
    length, pending = put_rows((state.length, state.pending), rows, (part.length, part.pending))
    return State(part.cache, length, pending, draft, sampling, state.reach)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _put(placement: Placement, old, rows: Int[Array, "1"], new):
    return placement.kept(put_rows(old, rows, new))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _copy(placement: Placement, state: State, source: Int[Array, "1"], row: Int[Array, "1"]) -> State:
    def copied(cache: tuple[KV, ...]) -> tuple[KV, ...]:
        return put_rows(cache, row, take_rows(cache, source))

    draft = state.draft
    draft = None if draft is None else draft._replace(cache=copied(draft.cache))
    return placement.kept(state._replace(cache=copied(state.cache), draft=draft))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(
    models: Models,
    weights: Weights,
    state: State,
    row: Int[Array, "1"],
    ids: Int[Array, "1 C"],
    next_ids: Int[Array, "1 C"],
    start: Int[Array, "1"],
    count: Int[Array, "1"],
    total: Int[Array, "1"],
    reach: Int[Array, "1"],
) -> tuple[State, LastRead]:
    """The first `count` of ids are tokens, the rest is padding: it is written behind them and never seen.

    total, reach: tokens of the prompt, and the most that prompt and answer may come to.
    """
    target = models.target.merge(weights.target)
    positions = start[:, None] + jnp.arange(ids.shape[1])
    attend = cached(positions, row)
    if state.reach is not None:
        state, total = state._replace(reach=put_rows(state.reach, row, reach)), reach
    per_token = jnp.broadcast_to(total[:, None], ids.shape)
    last, taps, cache = target(ids, positions, attend, state.cache, models.taps, per_token)

    def newest(x: Float[Array, "1 C H"]) -> Float[Array, "1 1 H"]:
        return jnp.take_along_axis(x, (count - 1)[:, None, None], axis=1)

    state, hidden = state._replace(cache=cache), newest(last.before_norm())
    if models.draft is None:
        return models.placement.kept((state, LastRead(hidden, None)))
    known, draft = state.draft, models.draft.merge(weights.draft)
    taps = taps.map(lambda a: a.astype(known.hidden.dtype))
    _, draft_cache = draft(draft.project(taps), next_ids, positions, attend, known.cache)
    state = state._replace(draft=known._replace(cache=draft_cache))
    return models.placement.kept((state, LastRead(hidden, taps.map(newest))))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _first(
    models: Models,
    weights: Weights,
    state: State,
    row: Int[Array, "1"],
    last: LastRead,
    length: Int[Array, "1"],
    scored: Bool[Array, "1"],
) -> tuple[State, Outcome]:
    """Chooses the token; the draft reads the prompt's last slot, which pairs its features with that token."""
    target, part = models.target.merge(weights.target), _part(state, row, with_sampling=True)
    hidden, taps = jax.tree.map(lambda x: jnp.repeat(x, fast_rows(1, 1), axis=1), last)
    logits = target.logits(LastHidden(hidden, normed=False))[:, :1]
    token = choose(logits[:, 0], length, part.sampling)
    sampling, known = observe(part.sampling, token, jnp.ones(1, bool)), part.draft
    if known is not None:
        draft, next_ids = models.draft.merge(weights.draft), jnp.repeat(token[:, None], fast_rows(1, 1), axis=1)
        hidden, cache = extend(draft, known.cache, taps, next_ids, length - 1, jnp.ones(1, jnp.int32), row)
        known = known._replace(cache=cache, hidden=hidden, count=jnp.zeros(1, jnp.int32))
    outcome = Outcome(
        tokens=token[:, None],
        accepted=jnp.zeros(1, jnp.int32),
        sound=sound(logits, jnp.ones(1, jnp.int32)),
        finite=jnp.ones(1, bool),
        scores=scores(logits, token[:, None], scored),
    )
    state = _joined(state, row, State(part.cache, length, token, known, sampling))
    return models.placement.kept((state, outcome))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _verify(
    models: Models, strategy: Strategy, weights: Weights, state: State, rows: Int[Array, "B"]
) -> tuple[State, Verified]:
    part, verified = verify(models, strategy, weights, _part(state, rows, with_sampling=False), rows)
    draft = None if state.draft is None else state.draft._replace(cache=part.draft.cache)
    return models.placement.kept(state._replace(cache=part.cache, draft=draft)), verified


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _commit(
    models: Models,
    strategy: Strategy,
    everything: bool,
    weights: Weights,
    state: State,
    verified: Verified,
    rows: Int[Array, "B"],
    scored: Bool[Array, "B"],
) -> tuple[State, Outcome]:
    part = _part(state, rows, with_sampling=everything)
    part, committed, logits = commit(models, strategy, weights, part, verified, rows)
    outcome = Outcome(
        tokens=committed.tokens,
        accepted=committed.accepted,
        sound=sound(logits, committed.accepted + 1),
        finite=committed.finite,
        scores=scores(logits, committed.tokens, scored) if everything else None,
    )
    return models.placement.kept((_joined(state, rows, part), outcome))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _catch_up(models: Models, weights: Weights, state: State, rows: Int[Array, "B"]) -> State:
    part = _part(state, rows, with_sampling=False)
    part = part._replace(draft=read_unread(models, weights, part.draft, part.length, rows))
    return models.placement.kept(_joined(state, rows, part))

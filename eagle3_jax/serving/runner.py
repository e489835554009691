"""The runner: compiled programs over the caches of all slots, and nothing that decides.

    set_sampling   a slot gets a request's settings
    read           a chunk of a prompt goes into the caches of target and draft
    first          the first new token of a prompt that is read to the end
    round          one round of a strategy for some slots (`speculate.round.one_round`), the others untouched

Rounds are compiled for 1, 2, 4, ... requests, and in two variants: all greedy, nothing else wanted; and everything. A
batch is filled up with rows that the caches lack, which are read as any row and never written. `warm_up` compiles all
there is, so that nothing is compiled while serving.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.attention import cached, empty_cache, put_rows, take_rows
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.drafting import DraftState, fast_rows
from eagle3_jax.speculate.generate import pair
from eagle3_jax.speculate.request import SamplingParams, device_sampling
from eagle3_jax.speculate.round import Models, State, Weights, cache_room, one_round
from eagle3_jax.speculate.sampling import Sampling, choose, observe
from eagle3_jax.speculate.scores import Scores, scores, sound
from eagle3_jax.speculate.strategy import Strategy
from eagle3_jax.taps import LastHidden, Taps

_NARROW = 16  # prompt tokens read at once where there are no more


class Outcome(NamedTuple):
    """Of a round or a first token: tokens[b, : accepted[b] + 1] are new. sound: the target's logits were finite."""

    tokens: Int[Array, "B levels"]
    accepted: Int[Array, "B"]
    sound: Bool[Array, "B"]
    scores: Scores | None


class Runner:
    """The caches of `slots` rows for texts of max_len tokens, and the programs over them."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        slots: int,
        max_len: int,
        chunk: int,
        strategies: Mapping[str, Strategy],
    ):
        self.models, self.weights = pair(target, draft)
        self._target, self._slots, self._strategies = target, slots, strategies
        self._chunk = min(chunk, max_len)
        self.entries = max_len + max(cache_room(strategy, batch=1) for strategy in strategies.values())
        self._neutral = [True] * slots
        width = 1 + max(strategy.depth for strategy in strategies.values())
        self._state = _empty(self.models, self.weights, target, draft, slots, self.entries, width)

    def warm_up(self) -> None:
        """Compiles every program there is, on rows that the caches lack."""
        nowhere = self._slots
        self._set_row(nowhere, [0], SamplingParams(seed=0))
        self.set_bias(nowhere, np.zeros(self._target.config.vocab_size, np.float32))
        for count in sorted({min(_NARROW, self._chunk), self._chunk}):
            hidden = self.read(nowhere, [0] * count, 0, count)
        self.first(nowhere, hidden, 1, True)
        for name in self._strategies:
            for size in _buckets(self._slots):
                for everything in (False, True):
                    self.round(name, [nowhere] * size, [everything] * size, everything)

    def set_sampling(self, slot: int, prompt: Sequence[int], params: SamplingParams) -> bool:
        """Gives a slot a request's settings; returns whether it needs the variant with everything."""
        neutral = device_sampling(self._target, [prompt], [params]) is None
        if not (neutral and self._neutral[slot]):
            self._set_row(slot, prompt, params)
            self._neutral[slot] = neutral
        return not neutral

    def _set_row(self, slot: int, prompt: Sequence[int], params: SamplingParams) -> None:
        new = device_sampling(self._target, [prompt], [params], complete=True)
        self._state = self._state._replace(sampling=_put(self._state.sampling, _row(slot), new))

    def set_bias(self, slot: int, bias: np.ndarray) -> None:
        """What is added to a slot's logits from now on, f32 [V]; -inf forbids a token."""
        if slot < self._slots:
            self._neutral[slot] = False
        sampling = self._state.sampling
        self._state = self._state._replace(sampling=sampling._replace(bias=_put(sampling.bias, _row(slot), bias[None])))

    def read(self, slot: int, prompt: Sequence[int], start: int, stop: int) -> jax.Array:
        """Reads tokens [start, stop) of a prompt, at most a chunk of them; those before are in the caches.

        Returns the last one's hidden state [1, 1, H], before the final norm.
        """
        size = min(_NARROW, self._chunk) if stop - start <= _NARROW else self._chunk
        start = min(start, self.entries - size)  # what is padded must fit as well, so some are read once more
        ids, next_ids = np.zeros((1, size), np.int32), np.zeros((1, size), np.int32)
        ids[0, : stop - start] = prompt[start:stop]
        following = prompt[start + 1 : stop + 1]  # the newest token's is not known yet: its entry is written again
        next_ids[0, : len(following)] = following
        args = (ids, next_ids, _row(start), _row(stop - start), _row(len(prompt)))
        self._state, hidden = _read(self.models, self.weights, self._state, _row(slot), *args)
        return hidden

    def first(self, slot: int, hidden: jax.Array, length: int, scored: bool) -> Outcome:
        """The first new token after a prompt of `length` tokens, from `read`'s last hidden state."""
        args = (_row(slot), hidden, _row(length), np.asarray([scored]))
        self._state, outcome = _first(self.models, self.weights, self._state, *args)
        return jax.device_get(outcome)

    def round(self, strategy: str, slots: Sequence[int], scored: Sequence[bool], everything: bool) -> Outcome:
        """One round for these slots. scored: who wants log probabilities. everything: anybody is not plainly greedy."""
        size = next(size for size in _buckets(self._slots) if size >= len(slots))
        rows, wanted = np.full(size, self._slots, np.int32), np.zeros(size, bool)
        rows[: len(slots)], wanted[: len(slots)] = slots, scored
        shape = self._strategies[strategy]
        self._state, outcome = _round(self.models, shape, everything, self.weights, self._state, rows, wanted)
        return jax.device_get(outcome)


def _buckets(slots: int) -> list[int]:
    """Numbers of requests for which rounds are compiled: powers of two up to `slots`, and that itself."""
    return [size for size in (1 << i for i in range(slots.bit_length())) if size < slots] + [slots]


def _row(number: int) -> np.ndarray:
    return np.asarray([number], np.int32)


def _empty(models: Models, weights: Weights, target: Target, draft: Draft | None, slots: int, entries: int, width: int):
    """The state of `slots` slots that hold nothing."""
    decoder, hidden = target.config, target.config.hidden_size
    try:
        cache = empty_cache(decoder.num_layers, slots, decoder.num_kv_heads, entries, decoder.head_dim, target.dtype)
        known = None
        if draft is not None:
            shape, dtype = draft.config.decoder, weights.draft["lm_head"]["weight"].dtype
            own = empty_cache(shape.num_layers, slots, shape.num_kv_heads, entries, shape.head_dim, dtype)
            features = Taps([jnp.zeros((slots, width, hidden), dtype) for _ in models.taps.points], models.taps)
            known = DraftState(own, features, jnp.zeros((slots, width), jnp.int32), jnp.ones(slots, jnp.int32))
        sampling = device_sampling(target, [[0]] * slots, [SamplingParams(seed=0)] * slots, complete=True)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"no memory for {slots} slots of {entries} tokens / {str(error).splitlines()[0]} / lower one of them"
        ) from error
    # Buffers of their own: a donated state must not hold one twice.
    return State(cache, jnp.ones(slots, jnp.int32), jnp.zeros(slots, jnp.int32), known, sampling)


@functools.partial(jax.jit, donate_argnums=0)
def _put(old, rows: Int[Array, "1"], new):
    return put_rows(old, rows, new)


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
) -> tuple[State, Float[Array, "1 1 H"]]:
    """The first `count` of ids are tokens, the rest is padding: it is written behind them and never seen."""
    target = models.target.merge(weights.target)
    positions = start[:, None] + jnp.arange(ids.shape[1])
    attend = cached(positions, row)
    per_token = jnp.broadcast_to(total[:, None], ids.shape)
    last, taps, cache = target(ids, positions, attend, state.cache, models.taps, per_token)
    hidden, state = _at(last.before_norm(), count - 1), state._replace(cache=cache)
    if models.draft is None:
        return state, hidden
    known, draft = state.draft, models.draft.merge(weights.draft)
    taps = taps.map(lambda a: a.astype(known.features.arrays[0].dtype))
    _, draft_cache = draft(draft.project(taps), next_ids, positions, attend, known.cache)
    newest = taps.map(lambda a: _at(a, count - 1)[:, 0])
    features = jax.tree.map(lambda old, new: old.at[row, 0].set(new, mode="drop"), known.features, newest)
    return state._replace(draft=known._replace(cache=draft_cache, features=features)), hidden


def _at(x: Float[Array, "1 C H"], index: Int[Array, "1"]) -> Float[Array, "1 1 H"]:
    return jnp.take_along_axis(x, index[:, None, None], axis=1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _first(
    models: Models,
    weights: Weights,
    state: State,
    row: Int[Array, "1"],
    hidden: Float[Array, "1 1 H"],
    length: Int[Array, "1"],
    scored: Bool[Array, "1"],
) -> tuple[State, Outcome]:
    target = models.target.merge(weights.target)
    logits = target.logits(LastHidden(jnp.repeat(hidden, fast_rows(1, 1), axis=1), normed=False))[:, :1]
    sampling = take_rows(state.sampling, row)
    token = choose(logits[:, 0], length, sampling)
    sampling = _keep_counts(state.sampling, row, observe(sampling, token, jnp.ones(1, bool)))
    known = state.draft
    if known is not None:
        next_ids = known.next_ids.at[row, 0].set(token, mode="drop")
        known = known._replace(next_ids=next_ids, count=known.count.at[row].set(1, mode="drop"))
    length, pending = put_rows((state.length, state.pending), row, (length, token))
    outcome = Outcome(token[:, None], jnp.zeros(1, jnp.int32), sound(logits, jnp.ones(1, jnp.int32)), None)
    outcome = outcome._replace(scores=scores(logits, token[:, None], scored))
    return State(state.cache, length, pending, known, sampling), outcome


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _round(
    models: Models,
    strategy: Strategy,
    everything: bool,
    weights: Weights,
    state: State,
    rows: Int[Array, "B"],
    scored: Bool[Array, "B"],
) -> tuple[State, Outcome]:
    drafts = strategy.depth > 0
    known = None
    if drafts:
        own = state.draft._replace(cache=())
        # What the last round of this strategy left.
        own = own._replace(features=own.features.map(lambda a: a[:, : strategy.depth + 1]))
        own = take_rows(own._replace(next_ids=own.next_ids[:, : strategy.depth + 1]), rows)
        known = own._replace(cache=state.draft.cache)
    length, pending = take_rows((state.length, state.pending), rows)
    sampling = take_rows(state.sampling, rows) if everything else None
    part = State(state.cache, length, pending, known, sampling)
    new, committed, logits = one_round(models, strategy, weights, part, rows)
    outcome = Outcome(committed.tokens, committed.accepted, sound(logits, committed.accepted + 1), None)
    if everything:
        outcome = outcome._replace(scores=scores(logits, committed.tokens, scored))
        sampling = _keep_counts(state.sampling, rows, new.sampling)
    else:
        sampling = state.sampling
    length, pending = put_rows((state.length, state.pending), rows, (new.length, new.pending))
    known = state.draft
    if drafts:
        width = slice(0, strategy.depth + 1)
        features = jax.tree.map(
            lambda old, n: old.at[rows, width].set(n, mode="drop"), known.features, new.draft.features
        )
        next_ids = known.next_ids.at[rows, width].set(new.draft.next_ids, mode="drop")
        known = DraftState(new.draft.cache, features, next_ids, put_rows(known.count, rows, new.draft.count))
    return State(new.cache, length, pending, known, sampling), outcome


def _keep_counts(all_slots: Sampling, rows: Int[Array, "B"], new: Sampling) -> Sampling:
    """Only the counts of tokens change from token to token."""
    penalties = all_slots.penalties
    counts = put_rows(penalties.counts, rows, new.penalties.counts)
    return all_slots._replace(penalties=penalties._replace(counts=counts))

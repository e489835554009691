"""The compiled programs of the engine, over a state that has a row for each slot (`speculate.round.State`).

    put, copy          rows of one value, or all entries of a slot
    read, first        a chunk of a prompt; the first new token after it
    verify, commit     the two halves of a round for some rows, the others untouched
    catch_up           the draft reads what plain rounds have left to it

The state is donated. `rows` may hold numbers that the state lacks: these only fill a batch, nothing of them is written.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.attention import KV, cached, empty_cache, put_rows, take_rows
from eagle3_jax.models.target import Target
from eagle3_jax.sharding import Placement
from eagle3_jax.speculate import round as rounds
from eagle3_jax.speculate.drafting import DraftState, extend, fast_rows
from eagle3_jax.speculate.request import SamplingParams, device_sampling
from eagle3_jax.speculate.round import UNREAD, Models, State, Verified, Weights
from eagle3_jax.speculate.sampling import choose, observe
from eagle3_jax.speculate.scores import Scores, scores, sound
from eagle3_jax.speculate.strategy import Strategy
from eagle3_jax.taps import LastHidden, Taps


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


def empty(models: Models, weights: Weights, target: Target, draft: Draft | None, slots: int, entries: int) -> State:
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
    """`empty` without the sampling."""
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
def put(placement: Placement, old, rows: Int[Array, "1"], new):
    return placement.kept(put_rows(old, rows, new))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy(placement: Placement, state: State, source: Int[Array, "1"], row: Int[Array, "1"]) -> State:
    def copied(cache: tuple[KV, ...]) -> tuple[KV, ...]:
        return put_rows(cache, row, take_rows(cache, source))

    draft = state.draft
    draft = None if draft is None else draft._replace(cache=copied(draft.cache))
    return placement.kept(state._replace(cache=copied(state.cache), draft=draft))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def read(
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
def first(
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
def verify(
    models: Models, strategy: Strategy, weights: Weights, state: State, rows: Int[Array, "B"]
) -> tuple[State, Verified]:
    part, verified = rounds.verify(models, strategy, weights, _part(state, rows, with_sampling=False), rows)
    draft = None if state.draft is None else state.draft._replace(cache=part.draft.cache)
    return models.placement.kept(state._replace(cache=part.cache, draft=draft)), verified


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def commit(
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
    part, committed, logits = rounds.commit(models, strategy, weights, part, verified, rows)
    outcome = Outcome(
        tokens=committed.tokens,
        accepted=committed.accepted,
        sound=sound(logits, committed.accepted + 1),
        finite=committed.finite,
        scores=scores(logits, committed.tokens, scored) if everything else None,
    )
    return models.placement.kept((_joined(state, rows, part), outcome))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def catch_up(models: Models, weights: Weights, state: State, rows: Int[Array, "B"]) -> State:
    part = _part(state, rows, with_sampling=False)
    part = part._replace(draft=rounds.read_unread(models, weights, part.draft, part.length, rows))
    return models.placement.kept(_joined(state, rows, part))

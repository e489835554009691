"""One compiled round of speculation, and the prefill before it (spec sections 7.1 to 7.3).

    draft    `drafting`: the draft grows a tree of continuations of what it has read
    verify   the target reads the pending token and the tree's nodes at once, each seeing its own ancestors; `verify`
             walks down while a child holds the token that the target chooses (argmax, or a sample)
    commit   accepted drafts and one more token of the target; the accepted nodes' KV entries are moved into place, the
             others stay behind and are overwritten; the draft reads what was committed

Plain decoding is a tree of the root alone, a chain a tree of one path. Shapes are fixed, caches are donated. A state
fits rounds of every strategy, so that each round may have another one: see `next_round`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.network import DraftModel
from eagle3_jax.models.attention import KV, cached_where, causal, empty_cache, finite
from eagle3_jax.models.decoder import CausalLM
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.sharding import ONE_DEVICE, Placement
from eagle3_jax.speculate.drafting import DraftState, draft_tree, extend, fast_rows, window_mask
from eagle3_jax.speculate.sampling import Sampling, choose, observe
from eagle3_jax.speculate.strategy import Strategy
from eagle3_jax.speculate.tree import Candidates, Tree, build_tree
from eagle3_jax.speculate.verify import Proposal, walk
from eagle3_jax.taps import LastHidden, Taps, TapSet

UNREAD = 16  # slots that plain rounds may leave to the draft; reading them together costs little more than reading one


class State(NamedTuple):
    """length: tokens in the target's cache, [B]. pending: the newest committed token, not yet read by the target.

    sampling: None for greedy decoding without processors. reach: the most tokens that each text may come to, where its
    rotations depend on that (`DecoderConfig.rope_border`), else None.
    """

    cache: tuple[KV, ...]
    length: Int[Array, "B"]
    pending: Int[Array, "B"]
    draft: DraftState | None
    sampling: Sampling | None
    reach: Int[Array, "B"] | None = None


class Committed(NamedTuple):
    """Outcome of a round. tokens[b, : accepted[b] + 1] are new; drafts [B, D] are the target ids on the best path: the
    accepted ones, then the likeliest below them; -1 where a tree is not as deep. finite: whether the draft's logits
    were all finite."""

    tokens: Int[Array, "B rows"]
    accepted: Int[Array, "B"]
    drafts: Int[Array, "B D"]
    finite: Bool[Array, "B"]


class Models(NamedTuple):
    """The static half of a pair: graphs, the taps that the draft reads (None, None without a draft), the devices."""

    target: Graph
    draft: Graph | None
    taps: TapSet | None
    placement: Placement = ONE_DEVICE


class Weights(NamedTuple):
    """The array half of a pair. d2t: int32 [Vd], target id of each draft id."""

    target: Params
    draft: Params | None
    d2t: Int[Array, "Vd"] | None


def cache_room(strategy: Strategy, batch: int) -> int:
    """Cache entries beyond the committed tokens that a round may write. Where strategies take turns it is the most that
    any of them needs, and no less than UNREAD."""
    return fast_rows(max(strategy.nodes, strategy.drafted_rows + 1, strategy.depth + 1), batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def prefill(
    models: Models,
    cache_length: int,
    weights: Weights,
    ids: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    sampling: Sampling | None,
    reach: Int[Array, "B"] | None = None,
) -> tuple[State, Int[Array, "B"]]:
    """Reads ragged prompts ids [B, P] of `lengths` tokens. Returns the state and the first new token of each.

    reach: see `State`.
    """
    target: CausalLM = models.target.merge(weights.target)
    batch, width = ids.shape
    positions = jnp.broadcast_to(jnp.arange(width), ids.shape)
    per_token = jnp.broadcast_to((lengths if reach is None else reach)[:, None], ids.shape)
    decoder, dtype = target.config, target.model.embed_tokens.weight[...].dtype
    shape = (decoder.num_layers, batch, decoder.num_kv_heads, cache_length, decoder.head_dim)
    cache = empty_cache(*shape, dtype, decoder.value_dim)
    last, taps, cache = target(ids, positions, _fill_cache, cache, models.taps, per_token)
    newest = LastHidden(jnp.repeat(_row(last.before_norm(), lengths - 1), fast_rows(1, batch), axis=1), last.normed)
    first = choose(target.logits(newest)[:, 0], lengths, sampling)
    sampling = observe(sampling, first, jnp.ones(batch, bool))
    if models.draft is None:
        return models.placement.kept((State(cache, lengths, first, None, sampling, reach), first))
    draft: DraftModel = models.draft.merge(weights.draft)
    shape, dtype = draft.config.decoder, draft.lm_head.weight[...].dtype
    draft_cache = empty_cache(shape.num_layers, batch, shape.num_kv_heads, cache_length, shape.head_dim, dtype)
    taps = taps.map(lambda a: a.astype(dtype))
    # The last slot's entry is written again, by the only ones whose output is wanted.
    _, draft_cache = draft(draft.project(taps), jnp.roll(ids, -1, axis=1), positions, _fill_cache, draft_cache)
    newest = taps.map(lambda a: jnp.repeat(_row(a, lengths - 1), fast_rows(1, batch), axis=1))
    next_ids = jnp.repeat(first[:, None], fast_rows(1, batch), axis=1)
    hidden, draft_cache = extend(draft, draft_cache, newest, next_ids, lengths - 1, jnp.ones_like(lengths))
    unread = taps.map(lambda a: jnp.zeros((batch, UNREAD, a.shape[-1]), dtype))
    nothing = jnp.zeros((batch, UNREAD), jnp.int32), jnp.zeros(batch, jnp.int32)
    state = DraftState(draft_cache, hidden, unread, *nothing)
    return models.placement.kept((State(cache, lengths, first, state, sampling, reach), first))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3,))
def speculate(models: Models, strategy: Strategy, weights: Weights, state: State) -> tuple[State, Committed]:
    """One round; a plain decoding step if the strategy has no draft tokens.

    A round with draft tokens takes a state whose draft has read everything (`catch_up`) and returns such a state. A
    plain round leaves its slot to be read; without a draft there is nothing to keep.
    A request that has come to the end of its cache stays there and goes on writing over its own last entries.
    """
    state, verified = verify(models, strategy, weights, state)
    state, committed, _ = commit(models, strategy, weights, state, verified)
    return models.placement.kept((state, committed))


class Verified(NamedTuple):
    """The first half of a round: the tree, and the target's logits and features at its nodes."""

    tree: Tree
    logits: Float[Array, "B N V"]
    taps: Taps | None
    candidates: Candidates


def verify(
    models: Models, strategy: Strategy, weights: Weights, state: State, rows: Int[Array, "B"] | None = None
) -> tuple[State, Verified]:
    """The draft grows a tree and the target reads it, inside of jit.

    rows: the rows of the caches that the requests have (see `cached_where`), None = request b has row b; all else in
    the state has a row for each request.
    """
    target: CausalLM = models.target.merge(weights.target)
    batch, entries = state.pending.shape[0], state.cache[0].k.shape[2]
    random = None if state.sampling is None else state.sampling.random
    candidates = _no_candidates(batch)
    if strategy.depth and models.draft is not None:
        draft: DraftModel = models.draft.merge(weights.draft)
        draft_cache, candidates = draft_tree(draft, weights.d2t, strategy, state.draft, state.length, random, rows)
        state = state._replace(draft=state.draft._replace(cache=draft_cache))
    tree = build_tree(strategy, state.pending, candidates)

    pad = fast_rows(strategy.nodes, batch) - strategy.nodes
    ids, depth = (jnp.pad(x, ((0, 0), (0, pad))) for x in (tree.tokens, tree.depth))
    sees = jnp.pad(tree.sees, ((0, 0), (0, pad), (0, pad))) | jnp.eye(strategy.nodes + pad, dtype=bool)
    positions, places = node_places(state.length, depth, entries)
    attend = cached_where(state.length, window_mask(state.length, sees, entries), positions, rows, places)
    reach = None if state.reach is None else jnp.broadcast_to(state.reach[:, None], ids.shape)
    last, taps, cache = target(ids, positions, attend, state.cache, models.taps, reach)
    verified = Verified(tree, target.logits(last)[:, : strategy.nodes], taps, candidates)
    return state._replace(cache=cache), verified


def commit(
    models: Models,
    strategy: Strategy,
    weights: Weights,
    state: State,
    verified: Verified,
    rows: Int[Array, "B"] | None = None,
) -> tuple[State, Committed, Float[Array, "B levels V"]]:
    """The walk down the tree and what follows from it, inside of jit; also the target's logits that each of
    `Committed.tokens` was chosen from. rows: as in `verify`."""
    batch, entries = state.pending.shape[0], state.cache[0].k.shape[2]
    tree, logits, taps, candidates = verified
    proposal = Proposal(candidates.logits, weights.d2t) if strategy.sampled else None
    steps = walk(strategy, tree, logits, state.length, state.sampling, proposal)
    cache = state.cache if strategy.is_chain else _compact(state.cache, state.length, steps.path[:, 1:], rows)
    count = steps.accepted + 1
    draft_state = state.draft
    if draft_state is not None:
        # A committed node's successor is the next token of the walk, up to the pending token.
        features = taps.map(lambda a: _rows(a, steps.path).astype(draft_state.hidden.dtype))
        if strategy.depth:
            draft: DraftModel = models.draft.merge(weights.draft)
            read = extend(draft, draft_state.cache, features, steps.tokens, state.length, count, rows)
            draft_state = draft_state._replace(hidden=read[0], cache=read[1])
        else:
            draft_state = _leave(draft_state, features, steps.tokens)
    pending = jnp.take_along_axis(steps.tokens, steps.accepted[:, None], axis=1)[:, 0]
    length = jnp.minimum(state.length + count, entries - cache_room(strategy, batch))
    new = State(cache, length, pending, draft_state, steps.sampling, state.reach)
    committed = Committed(steps.tokens, steps.accepted, steps.drafts, candidates.finite)
    return new, committed, _rows(logits, steps.path)


def programs() -> int:
    """How many there are of those that rounds run, compiled in this process so far."""
    return speculate._cache_size() + catch_up._cache_size()


def must_catch_up(strategy: Strategy, unread: int) -> bool:
    """Whether the draft must read the `unread` slots that plain rounds have left before a round of this strategy."""
    return unread > 0 and (strategy.depth > 0 or unread == UNREAD)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def catch_up(models: Models, weights: Weights, state: State) -> State:
    """The draft reads the slots that plain rounds have left."""
    return models.placement.kept(state._replace(draft=read_unread(models, weights, state.draft, state.length)))


def read_unread(
    models: Models, weights: Weights, left: DraftState, length: Int[Array, "B"], rows: Int[Array, "B"] | None = None
) -> DraftState:
    """`catch_up` inside of jit. rows: as in `verify`."""
    draft: DraftModel = models.draft.merge(weights.draft)
    start, count = length - left.count, jnp.maximum(left.count, 1)
    hidden, cache = extend(draft, left.cache, left.features, left.next_ids, start, count, rows)
    hidden = jnp.where((left.count > 0)[:, None, None], hidden, left.hidden)
    return left._replace(cache=cache, hidden=hidden, count=jnp.zeros_like(left.count))


def next_round(
    models: Models, strategy: Strategy, weights: Weights, state: State, unread: int
) -> tuple[State, Committed, int]:
    """`speculate` where strategies take turns: the draft catches up first if it must.

    unread: the plain rounds since it last did, as returned by the call before; 0 at first. Requests that have joined
    the batch meanwhile have fewer slots to read.
    """
    if state.draft is not None and must_catch_up(strategy, unread):
        state, unread = catch_up(models, weights, state), 0
    state, committed = speculate(models, strategy, weights, state)
    return state, committed, 0 if strategy.depth else unread + 1


def _leave(left: DraftState, features: Taps, tokens: Int[Array, "B 1"]) -> DraftState:
    """The draft's state with one more slot to read."""
    rows = jnp.arange(tokens.shape[0])

    def append(kept: Array, new: Array) -> Array:
        return kept.at[rows, left.count].set(new[:, 0], mode="drop")

    arrays = [append(kept, new) for kept, new in zip(left.features.arrays, features.arrays, strict=True)]
    kept = left._replace(features=Taps(arrays, features.tap_set), next_ids=append(left.next_ids, tokens))
    return kept._replace(count=left.count + 1)


def node_places(
    length: Int[Array, "B"], depth: Int[Array, "B N"], entries: int
) -> tuple[Int[Array, "B N"], Int[Array, "B S"]]:
    """Positions of a tree's nodes, and of all cache entries once the nodes lie behind the `length` committed ones.

    Where layers have windows, a node's position counts and not its entry, which is behind those of the nodes beside it.
    """
    positions = length[:, None] + depth
    put = jax.vmap(lambda row, at: jax.lax.dynamic_update_slice(jnp.arange(entries), row, (at,)))
    return positions, put(positions, length)


def _no_candidates(batch: int) -> Candidates:
    nothing = jnp.zeros((batch, 0), jnp.int32)
    return Candidates(nothing, nothing, None, nothing, None, jnp.ones(batch, bool))


def _compact(
    cache: tuple[KV, ...], length: Int[Array, "B"], path: Int[Array, "B D"], rows: Int[Array, "B"] | None
) -> tuple[KV, ...]:
    """Moves the entries of the path's nodes to where their tokens belong: node path[:, i] to entry length + 1 + i."""
    rows = jnp.arange(length.shape[0]) if rows is None else rows
    source, target = length[:, None] + path, length[:, None] + 1 + jnp.arange(path.shape[1])

    def move(entries):
        return entries.at[rows[:, None], :, target].set(entries[rows[:, None], :, source], mode="drop")

    return jax.tree.map(move, cache)


def _row(x: Float[Array, "B T H"], index: Int[Array, "B"]) -> Float[Array, "B 1 H"]:
    return _rows(x, index[:, None])


def _rows(x: Float[Array, "B T H"], index: Int[Array, "B R"]) -> Float[Array, "B R H"]:
    return jnp.take_along_axis(x, index[..., None], axis=1)


def _fill_cache(q, k, v, cache: KV, window: int | None = None, **how):
    """Attention of a prefill: causal over the prompt itself while keys and values go to the start of the cache.

    Prompts are padded on the right, so a causal mask alone keeps padding out of sight of every real token.
    """
    v = finite(v)
    out, _ = causal(jnp.zeros(q.shape[:2], jnp.int32))(q, k, v, None, window=window, **how)
    filled = [
        jax.lax.dynamic_update_slice(old, new.swapaxes(1, 2).astype(old.dtype), (0, 0, 0, 0))
        for old, new in ((cache.k, k), (cache.v, v))
    ]
    return out, KV(*filled)

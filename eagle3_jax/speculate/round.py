"""One compiled round of speculation, and the prefill before it (spec sections 7.1 to 7.3).

    draft    `drafting`: the draft reads the tokens committed last and grows a tree of continuations
    verify   the target reads the pending token and the tree's nodes at once, each seeing its own ancestors; `verify`
             walks down while a child holds the token that the target chooses (argmax, or a sample)
    commit   accepted drafts and one more token of the target; the accepted nodes' KV entries are moved into place, the
             others stay behind and are overwritten

Plain decoding is a tree of the root alone, a chain a tree of one path. Shapes are fixed, caches are donated.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.draft.network import DraftModel
from eagle3_jax.models.attention import KV, cached_where, causal, empty_cache, finite
from eagle3_jax.models.llama import LlamaForCausalLM
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.speculate.drafting import DraftState, draft_tree, fast_rows, window_mask
from eagle3_jax.speculate.sampling import Sampling, choose, observe
from eagle3_jax.speculate.strategy import Strategy
from eagle3_jax.speculate.tree import Candidates, build_tree
from eagle3_jax.speculate.verify import Proposal, walk
from eagle3_jax.taps import LastHidden, TapSet


class State(NamedTuple):
    """length: tokens in the target's cache, [B]. pending: the newest committed token, not yet read by the target.

    sampling: None for greedy decoding without processors.
    """

    cache: tuple[KV, ...]
    length: Int[Array, "B"]
    pending: Int[Array, "B"]
    draft: DraftState | None
    sampling: Sampling | None


class Committed(NamedTuple):
    """Outcome of a round. tokens[b, : accepted[b] + 1] are new; drafts [B, D] are the target ids on the best path: the
    accepted ones, then the likeliest below them; -1 where a tree is not as deep."""

    tokens: Int[Array, "B rows"]
    accepted: Int[Array, "B"]
    drafts: Int[Array, "B D"]


class Models(NamedTuple):
    """The static half of a pair: graphs, and the taps that the draft reads (None, None without a draft)."""

    target: Graph
    draft: Graph | None
    taps: TapSet | None


class Weights(NamedTuple):
    """The array half of a pair. d2t: int32 [Vd], target id of each draft id."""

    target: Params
    draft: Params | None
    d2t: Int[Array, "Vd"] | None


def cache_room(strategy: Strategy, batch: int) -> int:
    """Cache entries beyond the committed tokens that a round may write."""
    return fast_rows(max(strategy.nodes, strategy.drafted_rows + 1, strategy.depth + 1), batch)


def prefill(
    models: Models,
    cache_length: int,
    strategy: Strategy,
    weights: Weights,
    ids: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    sampling: Sampling | None,
) -> tuple[State, Int[Array, "B"]]:
    """Reads ragged prompts ids [B, P] of `lengths` tokens. Returns the state and the first new token of each.

    The state is ready for rounds of `strategy`, which changes no compiled program here.
    """
    state, first = _read_prompts(models, cache_length, weights, ids, lengths, sampling)
    if state.draft is None:
        return state, first
    known = (state.draft.features, state.draft.next_ids)
    widened = jax.tree.map(lambda x: jnp.repeat(x, strategy.depth + 1, axis=1), known)
    return state._replace(draft=DraftState(state.draft.cache, *widened, state.draft.count)), first


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read_prompts(
    models: Models,
    cache_length: int,
    weights: Weights,
    ids: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    sampling: Sampling | None,
) -> tuple[State, Int[Array, "B"]]:
    """The compiled part of `prefill`; the draft's state has one row, the last slot of the prompt.

    The first round extends over that slot: its entries are written once more, to the same values.
    """
    target: LlamaForCausalLM = models.target.merge(weights.target)
    batch, width = ids.shape
    positions = jnp.broadcast_to(jnp.arange(width), ids.shape)
    per_token = jnp.broadcast_to(lengths[:, None], ids.shape)
    decoder, dtype = target.config, target.model.embed_tokens.weight[...].dtype
    cache = empty_cache(decoder.num_layers, batch, decoder.num_kv_heads, cache_length, decoder.head_dim, dtype)
    last, taps, cache = target(ids, positions, _fill_cache, cache, models.taps, per_token)
    newest = LastHidden(jnp.repeat(_row(last.before_norm(), lengths - 1), fast_rows(1, batch), axis=1), last.normed)
    first = choose(target.logits(newest)[:, 0], lengths, sampling)
    sampling = observe(sampling, first, jnp.ones(batch, bool))
    if models.draft is None:
        return State(cache, lengths, first, None, sampling), first
    draft: DraftModel = models.draft.merge(weights.draft)
    shape, dtype = draft.config.decoder, draft.lm_head.weight[...].dtype
    draft_cache = empty_cache(shape.num_layers, batch, shape.num_kv_heads, cache_length, shape.head_dim, dtype)
    next_ids = jnp.where(positions == lengths[:, None] - 1, first[:, None], jnp.roll(ids, -1, axis=1))
    taps = taps.map(lambda a: a.astype(dtype))
    _, draft_cache = draft(draft.project(taps), next_ids, positions, _fill_cache, draft_cache)
    features = taps.map(lambda a: _row(a, lengths - 1))
    state = DraftState(draft_cache, features, first[:, None], jnp.ones(batch, jnp.int32))
    return State(cache, lengths, first, state, sampling), first


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3,))
def speculate(models: Models, strategy: Strategy, weights: Weights, state: State) -> tuple[State, Committed]:
    """One round; a plain decoding step if the strategy has no draft tokens.

    A request that has come to the end of its cache stays there and goes on writing over its own last entries.
    """
    state, committed, _ = one_round(models, strategy, weights, state)
    return state, committed


def one_round(
    models: Models, strategy: Strategy, weights: Weights, state: State, rows: Int[Array, "B"] | None = None
) -> tuple[State, Committed, Float[Array, "B levels V"]]:
    """`speculate` inside of jit; also the target's logits that each token of `Committed.tokens` was chosen from.

    rows: the rows of the caches that the requests have (see `cached_where`), None = request b has row b; all else in
    the state has a row for each request. features and next_ids may be wider than the strategy needs.
    """
    target: LlamaForCausalLM = models.target.merge(weights.target)
    batch, entries = state.pending.shape[0], state.cache[0].k.shape[2]
    room = cache_room(strategy, batch)
    random = None if state.sampling is None else state.sampling.random
    if strategy.depth and models.draft is not None:
        draft: DraftModel = models.draft.merge(weights.draft)
        draft_cache, candidates = draft_tree(draft, weights.d2t, strategy, state.draft, state.length, random, rows)
        proposal = Proposal(candidates.logits, weights.d2t) if strategy.sampled else None
    else:
        draft_cache, candidates, proposal = None, _no_candidates(batch), None
    tree = build_tree(strategy, state.pending, candidates)

    pad = fast_rows(strategy.nodes, batch) - strategy.nodes
    ids, depth = (jnp.pad(x, ((0, 0), (0, pad))) for x in (tree.tokens, tree.depth))
    sees = jnp.pad(tree.sees, ((0, 0), (0, pad), (0, pad))) | jnp.eye(strategy.nodes + pad, dtype=bool)
    attend = cached_where(state.length, window_mask(state.length, sees, entries), rows=rows)
    last, taps, cache = target(ids, state.length[:, None] + depth, attend, state.cache, models.taps)
    logits = target.logits(last)[:, : strategy.nodes]
    steps = walk(strategy, tree, logits, state.length, state.sampling, proposal)

    if not strategy.is_chain:
        cache = _compact(cache, state.length, steps.path[:, 1:], rows)
    count = steps.accepted + 1
    draft_state = None
    if draft_cache is not None:
        # A committed node's successor is the next token of the walk, up to the pending token.
        known, spare = state.draft, state.draft.next_ids.shape[1] - steps.tokens.shape[1]
        features = taps.map(lambda a: _rows(a, steps.path).astype(known.features.arrays[0].dtype))
        features, next_ids = jax.tree.map(lambda x: _widen(x, spare), (features, steps.tokens))
        draft_state = DraftState(draft_cache, features, next_ids, count)
    pending = jnp.take_along_axis(steps.tokens, steps.accepted[:, None], axis=1)[:, 0]
    length = jnp.minimum(state.length + count, entries - room)
    new = State(cache, length, pending, draft_state, steps.sampling)
    return new, Committed(steps.tokens, steps.accepted, steps.drafts), _rows(logits, steps.path)


def _widen(x: Array, spare: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))


def _no_candidates(batch: int) -> Candidates:
    nothing = jnp.zeros((batch, 0), jnp.int32)
    return Candidates(nothing, nothing, None, nothing, None)


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


def _fill_cache(q, k, v, cache: KV, window: int | None = None):
    """Attention of a prefill: causal over the prompt itself while keys and values go to the start of the cache.

    Prompts are padded on the right, so a causal mask alone keeps padding out of sight of every real token.
    """
    v = finite(v)
    out, _ = causal(jnp.zeros(q.shape[:2], jnp.int32))(q, k, v, None, window=window)
    filled = [
        jax.lax.dynamic_update_slice(old, new.swapaxes(1, 2).astype(old.dtype), (0, 0, 0, 0))
        for old, new in ((cache.k, k), (cache.v, v))
    ]
    return out, KV(*filled)

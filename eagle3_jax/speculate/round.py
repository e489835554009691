"""One compiled round of chain speculation, and the prefill before it (spec section 7.1).

    extend   the draft reads the tokens committed last, with their true target features, over its own KV cache
    draft    K tokens, the first from the extend, each fed back with the hidden state that predicted it
    verify   the target reads [pending token, K drafts] at once and chooses a token after each (argmax, or a sample);
             the longest prefix of drafts equal to its own choices is accepted
    commit   accepted drafts and one more token of the target; rejected KV entries stay behind and are overwritten

Accepting a draft exactly when it equals the target's own choice is lossless for sampling too: a draft token x is
accepted with probability p(x), and a rejected place holds a sample of p without x, the residual (spec 7.3).
K = 0 is plain decoding: verify reads the pending token alone. Shapes are fixed, caches are donated. With one sequence
the target and the draft read two rows even where one would do: a one-row matmul is many times slower on CPU.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle3_jax.draft.network import DraftModel
from eagle3_jax.models.attention import KV, cached, causal, empty_cache
from eagle3_jax.models.llama import LlamaForCausalLM
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.speculate.sampling import Sampling, choose
from eagle3_jax.taps import LastHidden, Taps, TapSet


class DraftState(NamedTuple):
    """What the draft needs between rounds: its cache, and the newest committed tokens with their target features.

    Row j of features/next_ids is slot `length - count + j`: the features of that token and the token after it; the
    last valid row (count - 1) carries the pending token. Rows from `count` on are leftovers.
    """

    cache: tuple[KV, ...]
    features: Taps
    next_ids: Int[Array, "B R"]
    count: Int[Array, "B"]


class State(NamedTuple):
    """length: tokens in the target's cache, [B]. pending: the newest committed token, not yet read by the target.

    sampling: None for greedy decoding.
    """

    cache: tuple[KV, ...]
    length: Int[Array, "B"]
    pending: Int[Array, "B"]
    draft: DraftState | None
    sampling: Sampling | None


class Committed(NamedTuple):
    """Outcome of a round. tokens[b, : accepted[b] + 1] are new; drafts [B, K] are the proposed target ids."""

    tokens: Int[Array, "B rows"]
    accepted: Int[Array, "B"]
    drafts: Int[Array, "B K"]


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


def rows_needed(depth: int, batch: int) -> int:
    """Tokens a sequence that verify reads: the pending one and the drafts, at least two rows in all."""
    return max(depth + 1, 2 if batch == 1 else 1)


def prefill(
    models: Models,
    cache_length: int,
    depth: int,
    weights: Weights,
    ids: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    sampling: Sampling | None,
) -> tuple[State, Int[Array, "B"]]:
    """Reads ragged prompts ids [B, P] of `lengths` tokens. Returns the state and the first new token of each.

    The state is ready for rounds of `depth` draft tokens; depth changes no compiled program here.
    """
    state, first = _read_prompts(models, cache_length, weights, ids, lengths, sampling)
    if state.draft is None:
        return state, first
    rows = rows_needed(depth, ids.shape[0])
    widened = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=1), (state.draft.features, state.draft.next_ids))
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
    rows = rows_needed(0, batch)
    newest = LastHidden(jnp.repeat(_row(last.before_norm(), lengths - 1), rows, axis=1), last.normed)
    first = choose(target.logits(newest), jnp.repeat(lengths[:, None], rows, axis=1), sampling)[:, 0]
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
def speculate(models: Models, depth: int, weights: Weights, state: State) -> tuple[State, Committed]:
    """One round with `depth` draft tokens; depth 0 is a plain decoding step."""
    target: LlamaForCausalLM = models.target.merge(weights.target)
    batch = state.pending.shape[0]
    draft_cache, drafts = _draft_chain(models, depth, weights, state)
    rows = rows_needed(depth, batch)
    block = jnp.concatenate([state.pending[:, None], drafts], axis=1)
    block = jnp.pad(block, ((0, 0), (0, rows - block.shape[1])))
    positions = state.length[:, None] + jnp.arange(rows)
    last, taps, cache = target(block, positions, cached(positions), state.cache, models.taps)
    choices = choose(target.logits(last), positions + 1, state.sampling)
    accepted = jnp.cumprod(drafts == choices[:, :depth], axis=1).sum(axis=1).astype(jnp.int32)
    count = accepted + 1
    pending = jnp.take_along_axis(choices, accepted[:, None], axis=1)[:, 0]
    draft_state = None
    if models.draft is not None:
        dtype = state.draft.features.arrays[0].dtype
        # Row j of the block held token j; the token after it is the target's choice there, up to the accepted ones.
        draft_state = DraftState(draft_cache, taps.map(lambda a: a.astype(dtype)), choices, count)
    new = State(cache, state.length + count, pending, draft_state, state.sampling)
    return new, Committed(choices, accepted, drafts)


def _draft_chain(models: Models, depth: int, weights: Weights, state: State) -> tuple[tuple[KV, ...] | None, Array]:
    """Extend and draft: the draft's new cache and `depth` proposed target ids a sequence, int32 [B, K]."""
    batch = state.pending.shape[0]
    if depth == 0 or models.draft is None:
        return None if state.draft is None else state.draft.cache, jnp.zeros((batch, 0), jnp.int32)
    draft: DraftModel = models.draft.merge(weights.draft)
    known = state.draft
    start = state.length - known.count
    positions = start[:, None] + jnp.arange(known.next_ids.shape[1])
    hidden = draft.project(known.features)
    y, cache = draft(hidden, known.next_ids, positions, cached(positions), known.cache)
    y = _row(y, known.count - 1)
    tokens = [_top(draft, weights, y)]
    pad = rows_needed(0, batch)
    for step in range(depth - 1):
        ids = jnp.repeat(tokens[-1][:, None], pad, axis=1)
        positions = (state.length + step)[:, None] + jnp.arange(pad)
        hidden = jnp.repeat(draft.feedback(y), pad, axis=1)
        # As in training, a window looks back from the last token with target features.
        anchors = jnp.broadcast_to(state.length[:, None] - 1, positions.shape)
        y, cache = draft(hidden, ids, positions, cached(positions, anchors), cache)
        y = y[:, :1]
        tokens.append(_top(draft, weights, y))
    return cache, jnp.stack(tokens, axis=1)


def _top(draft: DraftModel, weights: Weights, y: Float[Array, "B 1 H"]) -> Int[Array, "B"]:
    """The target id of the draft's most likely token."""
    rows = jnp.repeat(y, rows_needed(0, y.shape[0]), axis=1)
    return weights.d2t[jnp.argmax(draft.logits(rows)[:, 0], axis=-1)]


def _row(x: Float[Array, "B T H"], index: Int[Array, "B"]) -> Float[Array, "B 1 H"]:
    return jnp.take_along_axis(x, index[:, None, None], axis=1)


def _fill_cache(q, k, v, cache: KV, window: int | None = None):
    """Attention of a prefill: causal over the prompt itself while keys and values go to the start of the cache.

    Prompts are padded on the right, so a causal mask alone keeps padding out of sight of every real token.
    """
    out, _ = causal(jnp.zeros(q.shape[:2], jnp.int32))(q, k, v, None, window=window)
    filled = [
        jax.lax.dynamic_update_slice(old, new.swapaxes(1, 2).astype(old.dtype), (0, 0, 0, 0))
        for old, new in ((cache.k, k), (cache.v, v))
    ]
    return out, KV(*filled)

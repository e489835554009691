"""The draft's half of a round: grow a tree level by level, and extend over what was committed (spec 7.1, 7.2).

    grow     each level's best nodes ("beams") are read, each fed back with the hidden state that predicted it; a beam
             sees the committed tokens and its own ancestors, and the nodes of a level share one rotary position
    extend   the draft reads the tokens that were committed, with their true target features, over its own KV cache

The cache entries of beams lie behind the committed tokens and are overwritten by the next extend.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.network import DraftModel
from eagle3_jax.models.attention import KV, cached, cached_where
from eagle3_jax.speculate.sampling import Random, draft_noise
from eagle3_jax.speculate.strategy import Strategy
from eagle3_jax.speculate.tree import Candidates
from eagle3_jax.taps import Taps

_LOWEST = -1e30  # stands for a logit that is not finite: finite itself, so that sums of scores stay ordered
_MANY = 8  # rows of a request; where there are more, it pays to compute the outputs of the last ones only
_FAINTEST = -80.0  # log of the least probability, to the likeliest one, by which drafts are drawn


class DraftState(NamedTuple):
    """What the draft keeps between rounds, whatever their strategies.

    hidden: the draft's output at the last slot that it has read, from which the first draft token of a round comes.
    Rows of features/next_ids below `count` are slots that it has yet to read, since the rounds that committed them were
    plain ones: row j is slot `length - count + j`, the target's features of that token and the token after it.
    oracle: for measuring, target ids by position that chains propose in place of their own; -1 = their own.
    """

    cache: tuple[KV, ...]
    hidden: Float[Array, "B 1 H"]
    features: Taps
    next_ids: Int[Array, "B R"]
    count: Int[Array, "B"]
    oracle: Int[Array, "B S"] | None = None


def fast_rows(rows: int, batch: int) -> int:
    """Rows to compute where `rows` a sequence are wanted: a one-row matmul is many times slower on CPU than two."""
    return max(rows, 2) if batch == 1 else rows


def window_mask(length: Int[Array, "B"], sees: Bool[Array, "B T W"], entries: int) -> Bool[Array, "B T S"]:
    """Mask over a cache of `entries`: all below `length`, and entry length + w where sees[:, :, w]."""
    committed = jnp.broadcast_to(jnp.arange(entries) < length[:, None, None], (*sees.shape[:2], entries))
    put = jax.vmap(lambda row, seen, at: jax.lax.dynamic_update_slice(row, seen, (0, at)))
    return put(committed, sees, length)


def draft_tree(
    draft: DraftModel,
    d2t: Int[Array, "Vd"],
    strategy: Strategy,
    known: DraftState,
    length: Int[Array, "B"],
    random: Random | None,
    rows: Int[Array, "B"] | None = None,
) -> tuple[tuple[KV, ...], Candidates]:
    """The draft's new cache and the candidates of a round after `length` tokens in the target's cache, all of which
    the draft has read.

    random: of a request, for drafts that are sampled; unused otherwise. rows: of the cache, see `cached_where`.
    """
    y, cache = known.hidden, known.cache
    batch, entries, total = length.shape[0], cache[0].k.shape[2], strategy.drafted_rows
    noise = draft_noise(random, length, (1 + total, d2t.shape[0])) if strategy.sampled else None
    sees = jnp.zeros((batch, 1, total), bool)  # which of the beams read in this round each current beam sees
    score = jnp.zeros((batch, 1), jnp.float32)
    numbers = jnp.full((batch, 1), -1)  # candidate numbers of the current beams; -1 is the root
    tokens, parents, scores, beams, logits = [], [], [], [], []
    finite = jnp.ones(batch, bool)
    read = offset = noise_row = 0
    for level in range(1, strategy.depth + 1):
        level_logits = _logits(draft, y)
        finite &= jnp.isfinite(level_logits).all(axis=(1, 2))
        noisy = None if noise is None else noise[:, noise_row : noise_row + level_logits.shape[1]]
        noise_row += level_logits.shape[1]
        ids, gains, drawn_from = _continuations(level_logits, strategy, random, noisy)
        tokens.append(d2t[ids].reshape(batch, -1))
        if known.oracle is not None:
            told = jnp.take_along_axis(known.oracle, (length + level)[:, None], axis=1, mode="fill", fill_value=-1)
            tokens[-1] = jnp.where(told >= 0, told, tokens[-1])
        parents.append(jnp.repeat(numbers, strategy.top_k, axis=1))
        logits.append(drawn_from)
        if gains is not None:
            scores.append((score[..., None] + gains).reshape(batch, -1))
        if level == strategy.depth:
            break
        chosen = _beams(strategy, level, scores[-1] if gains is not None else None, batch)
        count, parent = chosen.shape[1], chosen // strategy.top_k
        sees = jnp.take_along_axis(sees, parent[..., None], axis=1)
        sees = sees | (jnp.arange(total) == read + jnp.arange(count)[:, None])
        if gains is not None:
            score = jnp.take_along_axis(scores[-1], chosen, axis=1)
        numbers = offset + chosen
        beams.append(numbers)
        pad = fast_rows(count, batch) - count
        hidden = jnp.take_along_axis(draft.feedback(y), parent[..., None], axis=1)
        ids = jnp.take_along_axis(tokens[-1], chosen, axis=1)
        hidden, ids, visible = (jnp.concatenate([x, x[:, :pad]], axis=1) for x in (hidden, ids, sees))
        positions = jnp.broadcast_to((length + level - 1)[:, None], ids.shape)
        # As in training, a layer's window looks back from the last token with target features.
        attend = cached_where(length + read, window_mask(length, visible, entries), length - 1, rows)
        y, cache = draft(hidden, ids, positions, attend, cache)
        y, read, offset = y[:, :count], read + count, offset + tokens[-1].shape[1]
    joined = [jnp.concatenate(x, axis=1) if x and x[0] is not None else None for x in (tokens, parents, scores)]
    expanded = jnp.concatenate([jnp.zeros((batch, 0), jnp.int32), *beams], axis=1)
    return cache, Candidates(*joined, expanded, jnp.concatenate(logits, axis=1) if strategy.sampled else None, finite)


def extend(
    draft: DraftModel,
    cache: tuple[KV, ...],
    features: Taps,
    next_ids: Int[Array, "B R"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    rows: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B 1 H"], tuple[KV, ...]]:
    """Reads slots start .. start + count - 1, count >= 1; returns the output at the last of them and the new cache.

    Rows from `count` on are leftovers; their entries are overwritten before anything sees them. rows: of the cache,
    see `cached_where`.
    """
    hidden, wanted = draft.project(features), count - 1
    positions = start[:, None] + jnp.arange(next_ids.shape[1])
    if next_ids.shape[1] > _MANY:
        # No output is wanted of these, so that the compiler leaves only the last layer's keys and values.
        _, cache = draft(hidden, next_ids, positions, cached(positions, rows), cache)
        first = jnp.maximum(count - fast_rows(1, count.shape[0]), 0)
        near = first[:, None] + jnp.arange(fast_rows(1, count.shape[0]))
        hidden = jnp.take_along_axis(hidden, near[..., None], axis=1)
        next_ids, positions, wanted = jnp.take_along_axis(next_ids, near, axis=1), start[:, None] + near, wanted - first
    y, cache = draft(hidden, next_ids, positions, cached(positions, rows), cache)
    return jnp.take_along_axis(y, wanted[:, None, None], axis=1), cache


def _logits(draft: DraftModel, y: Float[Array, "B E H"]) -> Float[Array, "B E Vd"]:
    rows = y.shape[1]
    return draft.logits(jnp.repeat(y, fast_rows(rows, y.shape[0]), axis=1) if rows == 1 else y)[:, :rows]


def _continuations(logits, strategy: Strategy, random: Random | None, noise: Array | None):
    """Draft ids [B, E, K] that continue each beam, their gains in score, and the logits that they were drawn from.

    Deterministic: the K likeliest, gains their log probabilities. Sampled: K draws without replacement, in the order
    of drawing (Gumbel top-k); the j-th draw is scored by the j-th highest log probability and not by its own. So
    whether a draw is verified does not depend on what was drawn, without which acceptance by p/q would be biased.
    """
    if strategy.is_chain and not strategy.sampled:
        return jnp.argmax(logits, axis=-1)[..., None].astype(jnp.int32), None, None
    logits = jnp.where(jnp.isfinite(logits), logits, _LOWEST)
    if not strategy.sampled:
        gains, ids = jax.lax.top_k(logits if strategy.is_static else jax.nn.log_softmax(logits), strategy.top_k)
        return ids, None if strategy.is_static else gains, None
    # Within a range in which noise is not lost, so that those equally unlikely are drawn equally often.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / random.draft_temperature[:, None, None]
    logits = jnp.maximum(logits, _FAINTEST)
    gains = None if strategy.is_static else jax.lax.top_k(jax.nn.log_softmax(logits), strategy.top_k)[0]
    ids = jax.lax.top_k(logits + noise, strategy.top_k)[1]
    return ids, gains, logits


def _beams(strategy: Strategy, level: int, scores: Float[Array, "B C"] | None, batch: int) -> Int[Array, "B E"]:
    """The candidates of this level, numbered within it, that the draft reads next."""
    if strategy.is_static:
        beams = jnp.asarray(strategy.beams[level - 1], jnp.int32)
        return jnp.broadcast_to(beams, (batch, len(beams)))
    return jax.lax.top_k(scores, strategy.top_k)[1]

"""Scaled dot-product attention over whole sequences and over a key/value cache.

Both return (output, new layer cache), the contract of the `attend` function that decoder blocks are given: blocks know
nothing of masks or caches. Softmax is in float32. Grouped queries (GQA): N query heads share K key/value heads.

An `attend` takes the keyword `window` where a layer may look back only so many positions, its own included, and hands
the others on to the arithmetic here: `scale` of the scores (None = head_dim**-0.5), `softcap` c (c tanh(s / c) in place
of a score s) and `sinks` (one learned logit a head that takes part in the softmax and has no value).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class KV(NamedTuple):
    """Keys and values of one layer, [B, K, S, D]: S last but one, so that no step transposes the cache on CPU."""

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S Dv"]


BLOCK = 512  # queries of a row that attend at a time, in rows of up to
BLOCK_ROW = 2048  # tokens; of longer ones fewer, so that their scores take no more
TILE = 128  # queries, and keys, of `tiled_attention`
_LOWEST = -1e30  # below any score, and finite, so that differences are

# (q, k, v, layer cache, **keywords) -> (output, new layer cache); only the `attend` at hand knows what a cache is.
Attend = Callable[..., tuple[Array, Any]]


def empty_cache(
    layers: int, batch: int, heads: int, length: int, head_dim: int, dtype, value_dim: int | None = None
) -> tuple[KV, ...]:
    """Zeroed caches for `layers` layers, one KV each. value_dim: size of a head's values, None = head_dim."""
    keys, values = ((batch, heads, length, size) for size in (head_dim, value_dim or head_dim))
    return tuple(KV(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(layers))


def causal(document_ids: Int[Array, "B T"], block: int = BLOCK, frozen: bool = False) -> Attend:
    """Attention within a packed row: token t sees tokens j <= t of its own document. block: see `by_blocks`.

    frozen: no gradient will be asked for, so that a CPU may use `tiled_attention` for rows of several tiles.
    """

    def attend(q, k, v, cache, window=None, **how):
        def blocks(q, k, v):
            def part(slots, q):
                return full_attention(q, k, v, row_mask(slots, document_ids, window), **how)

            return by_blocks(part, block, row_slots(document_ids), q)

        def tiles(q, k, v):
            return tiled_attention(q, k, v, document_ids, window, **how)

        if not frozen or q.shape[1] <= TILE or "sinks" in how:
            return blocks(q, k, v), cache
        return jax.lax.platform_dependent(q, k, v, cpu=tiles, default=blocks), cache

    return attend


def row_slots(document_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The place of each token in its row."""
    return jnp.broadcast_to(jnp.arange(document_ids.shape[1]), document_ids.shape)


def row_mask(
    slots: Int[Array, "B Q"], document_ids: Int[Array, "B T"], window: int | None = None
) -> Bool[Array, "B Q T"]:
    """The tokens of a packed row that queries at `slots` see: those of their document and window up to themselves."""
    keys, documents = jnp.arange(document_ids.shape[1]), jnp.take_along_axis(document_ids, slots, axis=1)
    seen = (slots[..., None] >= keys) & (documents[..., None] == document_ids[:, None])
    return seen & in_window(slots[..., None], keys, window)


def by_blocks(attend: Callable[..., Array], block: int, *queries: Any) -> Float[Array, "B T N D"]:
    """attend(*queries) for at most `block` queries at a time, so that scores take block x T and never T x T; for fewer
    (but TILE) in rows of more than BLOCK_ROW tokens.

    queries: trees of arrays [B, T, ...], cut along T into equal blocks, of which the last is filled up with its last
    query. The backward pass computes the scores of a block again. Rows of one block are attended to at once, and all of
    that is kept.
    """
    length = jax.tree.leaves(queries)[0].shape[1]
    block = min(block, max(BLOCK * BLOCK_ROW // length, TILE))
    if length <= block:
        return attend(*queries)
    count = -(-length // block)
    size = -(-length // count)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)

    attend = jax.checkpoint(attend, prevent_cse=False)  # within a loop there is nothing to be merged with
    out = jax.lax.map(lambda part: attend(*part), jax.tree.map(cut, queries)).swapaxes(0, 1)
    return out.reshape(out.shape[0], count * size, *out.shape[3:])[:, :length]


def in_window(query: Int[Array, "*q 1"], key: Int[Array, "*k S"], window: int | None) -> Bool[Array, "..."]:
    """Whether `key` is one of the last `window` positions up to `query`, itself included; None = always (causality is
    not checked)."""
    return jnp.ones((), bool) if window is None else key > query - window


def full_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K Dv"],
    mask: Bool[Array, "B T S"],
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N Dv"]:
    """Softmax attention of queries of a row over all of it: `jax.nn.dot_product_attention`, and a float32 form on CPU.

    On CPU the former takes two to three times as long (docs/performance.md); it has no softcap and no sinks, and wants
    values of the keys' size and one dtype, which not every draft's file has.
    """

    def own(q, k, v, mask):
        bias = None if sinks is None else sinks[:, None, None]
        weights = attention_weights(head_scores(q, k, scale), mask[:, None], softcap, bias)
        return mix_values(weights, v, q.dtype)

    def library(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=scale)

    if softcap is not None or sinks is not None or v.shape[-1] != k.shape[-1] or len({q.dtype, k.dtype, v.dtype}) > 1:
        return own(q, k, v, mask)
    return jax.lax.platform_dependent(*(q, k, v, mask), cpu=own, default=library)


def tiled_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"],
    document_ids: Int[Array, "B T"],
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N Dv"]:
    """Attention within packed rows, for each tile of queries over the tiles of keys between the earliest beginning of
    their documents and themselves: work grows with documents, not with rows. The softmax is summed up on the way
    (Milakov & Gimelshein 2018). Not differentiable in reverse: how many tiles there are is known when it runs.
    """
    length, heads, dtype = q.shape[1], q.shape[2], q.dtype
    count = -(-length // TILE)
    padding = [(0, 0), (0, count * TILE - length)]
    documents = jnp.pad(document_ids, padding, constant_values=-1)
    q, k, v = (_heads_first(jnp.pad(x, [*padding, (0, 0), (0, 0)]), heads) for x in (q, k, v))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    of_tiles = documents[:, ::TILE, None] == documents[:, None]
    first = jnp.min(jnp.argmax(of_tiles, axis=-1), axis=0) // TILE

    def tile(x: Array, i: Int[Array, ""], axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, i * TILE, TILE, axis)

    def attend(i: Int[Array, ""]) -> Array:
        """Tile i of the queries, [B, N, TILE, Dv]."""
        queries, places = tile(q, i, 2), i * TILE + jnp.arange(TILE)

        def add(j: Int[Array, ""], so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, out = so_far
            scores = jnp.einsum("bntd,bnsd->bnts", queries, tile(k, j, 2))
            keys = j * TILE + jnp.arange(TILE)
            seen = (places[:, None] >= keys) & in_window(places[:, None], keys, window)
            seen = seen & (tile(documents, i, 1)[..., None] == tile(documents, j, 1)[:, None])
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            scores = jnp.where(seen[:, None], scores, _LOWEST)
            top = jnp.maximum(highest, jnp.max(scores, axis=-1))
            terms, fade = jnp.where(seen[:, None], jnp.exp(scores - top[..., None]), 0.0), jnp.exp(highest - top)
            mixed = jnp.einsum("bnts,bnsd->bntd", terms, tile(v, j, 2))
            return top, total * fade + jnp.sum(terms, axis=-1), out * fade[..., None] + mixed

        shape = queries.shape[:-1]
        nothing = jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1]))
        _, total, out = jax.lax.fori_loop(first[i], i + 1, add, nothing)
        return out / total[..., None]

    out = jax.lax.map(attend, jnp.arange(count))  # tiles, B, N, TILE, Dv
    out = out.transpose(1, 0, 3, 2, 4).reshape(q.shape[0], count * TILE, heads, -1)
    return out[:, :length].astype(dtype)


def attention_weights(
    scores: Float[Array, "*rows S"],
    mask: Bool[Array, "*mask_rows S"],
    softcap: float | None = None,
    sinks: Float[Array, "*sink_rows 1"] | None = None,
) -> Float[Array, "*rows S"]:
    """Softmax of float32 scores over what the mask lets through; a sink is one more term of the sum."""
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask, scores, -jnp.inf)
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(jnp.float32)
    highest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    terms = jnp.exp(scores - highest)
    return terms / (jnp.sum(terms, axis=-1, keepdims=True) + jnp.exp(sinks - highest))


def head_scores(
    q: Float[Array, "B T N D"], k: Float[Array, "B S K D"], scale: float | None = None
) -> Float[Array, "B N T S"]:
    """Scaled float32 scores of every query head with the keys of its group, heads leading: the fast order on CPU."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = _heads_first(q, q.shape[2]) * scale, _heads_first(k, q.shape[2])
    return jnp.einsum("bntd,bnsd->bnts", q, k)


def mix_values(weights: Float[Array, "B N T S"], v: Float[Array, "B S K D"], dtype) -> Float[Array, "B T N D"]:
    """Weighted sums of values, back in [B, T, N, D] and the given dtype."""
    out = jnp.einsum("bnts,bnsd->bntd", weights, _heads_first(v, weights.shape[1]))
    return out.transpose(0, 2, 1, 3).astype(dtype)


def _heads_first(x: Float[Array, "B T K D"], heads: int) -> Float[Array, "B N T D"]:
    """float32 [B, N, T, D], each of the K heads repeated for the query heads of its group."""
    return jnp.repeat(x.astype(jnp.float32).transpose(0, 2, 1, 3), heads // x.shape[2], axis=1)


def cached(positions: Int[Array, "B T"], rows: Int[Array, "B"] | None = None) -> Attend:
    """Attention of T consecutive tokens a sequence over a cache: keys are written at `positions` first.

    Token at position p sees cache entries <= p; entries beyond are leftovers of rejected tokens, never read before
    they are overwritten. Positions of a row are consecutive: positions[b, t] = positions[b, 0] + t. rows: see
    `cached_where`.
    """

    def attend(q, k, v, cache: KV, window=None, **how):
        entries = jnp.arange(cache.k.shape[2])
        mask = (entries <= positions[..., None]) & in_window(positions[..., None], entries, window)
        return cached_where(positions[:, 0], mask, rows=rows)(q, k, v, cache, **how)

    return attend


def cached_where(
    start: Int[Array, "B"],
    mask: Bool[Array, "B T S"],
    anchor: Int[Array, "B"] | Int[Array, "B T"] | None = None,
    rows: Int[Array, "B"] | None = None,
    places: Int[Array, "B S"] | None = None,
) -> Attend:
    """Attention of T tokens a sequence over a cache of S entries: keys are written from entry `start` on, then token t
    sees the entries of mask[:, t], whatever their positions (the nodes of a draft tree).

    anchor: the position from which a layer's window looks back, of each sequence or of each token; needed where layers
    have one. places: the position of each entry, None = its number.
    rows: the row of the cache that each sequence has, None = its own number. A sequence whose row the cache lacks only
    fills a batch: nothing of it is written. Where there are as many sequences as rows, each must have its own number or
    none. No sequence sees entries from start + T on.
    """

    def attend(q, k, v, cache: KV, window=None, **how):
        seen = mask
        if window is not None:
            at = jnp.arange(cache.k.shape[2]) if places is None else places[:, None]
            seen = mask & in_window(anchor.reshape(*anchor.shape[:1], -1, 1), at, window)
        cache = KV(_write(cache.k, k, start, rows), _write(cache.v, finite(v), start, rows))
        if rows is None:
            return _grouped(q, *cache, seen, **how), cache
        end = jnp.max(jnp.where(rows < cache.k.shape[0], start + q.shape[1], 0))
        return _over_rows(q, cache, seen, rows, end, how), cache

    return attend


def finite(v: Float[Array, "B T K D"]) -> Float[Array, "B T K D"]:
    """Values with zero for what is not finite. A masked entry has weight 0, and 0 times infinity or NaN is NaN, so that
    leftovers of a rejected token or of padding would spoil every later token."""
    return jnp.where(jnp.isfinite(v), v, 0)


def take_rows(tree: Any, rows: Int[Array, "B"]) -> Any:
    """The given rows of every array; a row that the arrays lack is read as their last one."""
    return jax.tree.map(lambda x: x[jnp.minimum(rows, x.shape[0] - 1)], tree)


def put_rows(tree: Any, rows: Int[Array, "B"], new: Any) -> Any:
    """Every array with the given rows replaced; a row that the arrays lack is left out."""
    return jax.tree.map(lambda x, n: x.at[rows].set(n, mode="drop"), tree, new)


def _over_rows(
    q: Float[Array, "B T N D"],
    cache: KV,
    mask: Bool[Array, "B T S"],
    rows: Int[Array, "B"],
    end: Int[Array, ""],
    how: dict[str, Any],
) -> Float[Array, "B T N Dv"]:
    """Attention over some rows of a cache, of which entries from `end` on are not seen.

    On CPU the time goes with the entries that are read and the copy of the rows, so that the part read is chosen when
    running, among halves of the cache; elsewhere a choice costs more than it spares.
    """
    count, entries = cache.k.shape[0], cache.k.shape[2]
    widths = [entries]
    while widths[0] >= 256:
        widths.insert(0, -(-widths[0] // 2))

    def over(width: int):
        def attend(q, cache, mask, rows):
            here = jax.tree.map(lambda x: x[:, :, :width], cache)
            here = here if len(rows) == count else take_rows(here, rows)
            return _grouped(q, *here, mask[:, :, :width], **how)

        return attend

    def shortest(q, cache, mask, rows):
        which = (end > jnp.asarray(widths[:-1], jnp.int32)).sum()
        return jax.lax.switch(which, [over(width) for width in widths], q, cache, mask, rows)

    return jax.lax.platform_dependent(q, cache, mask, rows, cpu=shortest, default=over(entries))


def _write(cache: Float[Array, "R K S D"], new: Float[Array, "B T K D"], start: Int[Array, "B"], rows):
    """new[b] in the cache's row rows[b] from entry start[b] on; nothing of it where the row or the end is outside."""
    rows = jnp.arange(new.shape[0]) if rows is None else rows
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 2)
    )
    at, new = jnp.stack([rows, start], axis=-1), new.swapaxes(1, 2).astype(cache.dtype)
    return jax.lax.scatter(cache, at, new, dimensions, mode=jax.lax.GatherScatterMode.FILL_OR_DROP)


def _grouped(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S Dv"],
    mask: Bool[Array, "B T S"],
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N Dv"]:
    b, t, n, d = q.shape
    heads = k.shape[1]
    scale = d**-0.5 if scale is None else scale
    q = q.reshape(b, t, heads, n // heads, d).transpose(0, 2, 1, 3, 4).reshape(b, heads, t * (n // heads), d)
    scores = jnp.einsum("bkqd,bksd->bkqs", q, k, preferred_element_type=jnp.float32) * scale
    mask = jnp.repeat(mask, n // heads, axis=1)[:, None]
    bias = None if sinks is None else jnp.tile(sinks.reshape(heads, -1), (1, t))[..., None]
    weights = attention_weights(scores, mask, softcap, bias).astype(v.dtype)
    out = jnp.einsum("bkqs,bksd->bkqd", weights, v)
    return out.reshape(b, heads, t, n // heads, -1).transpose(0, 2, 1, 3, 4).reshape(b, t, n, -1)

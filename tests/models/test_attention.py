"""Attention over a cache: what is masked has no influence, whatever it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.models.attention import BLOCK, KV, TILE, cached, causal, empty_cache, full_attention


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_entries_that_are_not_finite_have_no_influence(bad: float) -> None:
    q, k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((1, 3, 2, 4)), jnp.float32) for i in range(3))
    (cache,) = empty_cache(1, 1, 2, 8, 4, jnp.float32)
    expected, _ = cached(jnp.arange(3)[None])(q, k, v, cache)
    spoilt, later = cached(jnp.arange(3)[None])(q, k.at[:, 2].set(bad), v.at[:, 2].set(bad), cache)
    np.testing.assert_array_equal(spoilt[:, :2], expected[:, :2])
    # The second token read once more, over the leftovers of the third.
    again, _ = cached(jnp.asarray([[1]]))(q[:, 1:2], k[:, 1:2], v[:, 1:2], later)
    np.testing.assert_allclose(again, expected[:, 1:2], rtol=1e-6)


@pytest.mark.parametrize(("rows", "start"), [((3, 0), (5, 17)), ((1, 9), (300, 20)), ((0, 1, 9, 3), (5, 100, 0, 500))])
def test_sequences_over_rows_of_a_cache(rows: tuple[int, ...], start: tuple[int, ...]) -> None:
    """As over a cache of their own, wherever they are in it; what only fills the batch (row 9) is written nowhere."""
    draw = np.random.default_rng(0)
    cache = KV(*(jnp.asarray(draw.standard_normal((4, 2, 520, 4)), jnp.float32) for _ in range(2)))
    q, k, v = (jnp.asarray(draw.standard_normal((len(rows), 3, heads, 4)), jnp.float32) for heads in (4, 2, 2))
    positions = jnp.asarray(start)[:, None] + jnp.arange(3)
    out, new = jax.jit(lambda *args: cached(positions, jnp.asarray(rows))(*args))(q, k, v, cache)
    untouched = [row for row in range(4) if row not in rows]
    for got, old in zip(new, cache, strict=True):
        np.testing.assert_array_equal(got[np.asarray(untouched, int)], old[np.asarray(untouched, int)])
    for i, row in enumerate(rows):
        if row < 4:
            own = KV(*(x[row : row + 1] for x in cache))
            expected, written = cached(positions[i : i + 1])(q[i : i + 1], k[i : i + 1], v[i : i + 1], own)
            np.testing.assert_allclose(out[i : i + 1], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(new.k[row], written.k[0])


def test_queries_and_keys_of_two_dtypes() -> None:
    """A draft's file may have them, and is used as it is stored."""
    draw, mask = np.random.default_rng(0), jnp.tril(jnp.ones((1, 3, 3), bool))
    q, k, v = (jnp.asarray(draw.standard_normal((1, 3, heads, 4)), jnp.float16) for heads in (4, 2, 2))
    mixed = full_attention(q.astype(jnp.float32), k, v, mask)
    assert mixed.dtype == jnp.float32
    np.testing.assert_allclose(mixed, full_attention(q, k, v, mask), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("how", [{}, {"window": 3, "softcap": 2.0}])
def test_queries_in_blocks_are_the_row_at_once(how: dict) -> None:
    """Eleven tokens in blocks of four, the last of them filled up; grouped heads, two documents and padding."""
    draw, documents = np.random.default_rng(0), jnp.asarray([[0] * 5 + [1] * 4 + [-1] * 2, [0] * 11])
    q, k, v = (jnp.asarray(draw.standard_normal((2, 11, heads, 4)), jnp.float32) for heads in (4, 2, 2))

    def outcome(block: int):
        def loss(q, k, v):
            out, _ = causal(documents, block)(q, k, v, None, **how)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    for got, expected in zip(jax.tree.leaves(outcome(4)), jax.tree.leaves(outcome(11)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_scores_of_a_long_row_take_a_block_of_it() -> None:
    """With gradients, whatever the compiler makes of it."""
    length, heads = 16 * BLOCK, 2

    def loss(q, k, v, documents):
        return jnp.sum(causal(documents)(q, k, v, None)[0])

    shapes = [jax.ShapeDtypeStruct((1, length, heads, 4), jnp.float32)] * 3
    compiled = jax.jit(jax.grad(loss)).lower(*shapes, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (4 * heads * BLOCK * length)


@pytest.mark.parametrize("how", [{}, {"window": 40, "softcap": 5.0, "scale": 0.3}], ids=["plain", "window and softcap"])
def test_tiles_of_a_row_give_what_the_row_gives_at_once(how) -> None:
    """Documents that begin within tiles and end in later ones, padding, and a row that is no multiple of a tile."""
    assert TILE == 128
    rng, length = np.random.default_rng(0), 300
    documents = np.stack([np.repeat([0, 1, 2, -1], [50, 150, 60, 40]), np.repeat([0, 1, 2, 3], [130, 10, 150, 10])])
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    once, _ = causal(jnp.asarray(documents))(q, k, v, None, **how)
    tiles, _ = jax.jit(lambda *x: causal(jnp.asarray(documents), frozen=True)(*x, None, **how))(q, k, v)
    np.testing.assert_allclose(tiles, once, atol=1e-5)

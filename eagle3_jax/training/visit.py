"""Work on some tokens of a batch only, a chunk at a time: the heads and the loss need none but supervised tokens.

Logits of whole rows would be the largest arrays of training, and prompts and padding need none. The wanted tokens are
put first; a loop, as long as there are wanted tokens, then takes chunk after chunk of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

CHUNK = 512  # tokens whose logits exist at a time


def visit(
    function: Callable[[Any], tuple[Any, Any]],
    tokens: Any,
    wanted: Bool[Array, "B T"],
    chunk: int,
    groups: int = 1,
) -> tuple[Any, Any]:
    """function(chunk of tokens) -> (results, sums) over the wanted tokens of rows, `chunk` at a time of each group.

    tokens: a tree of arrays [B, T, ...]; function gets it as [groups, C, ...], may meet a few tokens that are not
    wanted, and returns results [groups, C, ...] and sums of any shape. groups: parts of the rows that lie on different
    devices, each of which visits its own tokens; B is a multiple of it.
    Returns (results [B, T, ...], zero or unspecified where not wanted; sums over all chunks). Not differentiable.
    """
    rows, length = wanted.shape
    count = rows // groups * length
    size = min(chunk, count)
    wanted = wanted.reshape(groups, count)
    order = jnp.argsort(~wanted, axis=1, stable=True)
    padded = -(-count // size) * size - count

    def arrange(x: jax.Array) -> jax.Array:
        x = _take(x.reshape(groups, count, *x.shape[2:]), order)
        return jnp.pad(x, [(0, 0), (0, padded)] + [(0, 0)] * (x.ndim - 2))

    def back(x: jax.Array) -> jax.Array:
        return _take(x, jnp.argsort(order, axis=1)).reshape(rows, length, *x.shape[2:])

    arranged = jax.tree.map(arrange, tokens)

    def work(i: Int[Array, ""] | int) -> tuple[Any, Any]:
        return function(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size, 1), arranged))

    def step(i: Int[Array, ""] | int, so_far: tuple[Any, Any]) -> tuple[Any, Any]:
        results, sums = work(i)
        put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, i * size, 1)  # noqa: E731
        return jax.tree.map(put, so_far[0], results), jax.tree.map(jnp.add, so_far[1], sums)

    results, sums = jax.eval_shape(work, jnp.int32(0))
    results = jax.tree.map(lambda x: jnp.zeros((groups, count + padded, *x.shape[2:]), x.dtype), results)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    chunks = -(-jnp.max(jnp.sum(wanted, axis=1)) // size)
    results, sums = jax.lax.fori_loop(0, chunks, step, (results, sums))
    return jax.tree.map(back, results), sums


def _take(x: jax.Array, places: Int[Array, "groups count"]) -> jax.Array:
    """x[g, places[g, i]] for every g and i."""
    return jax.vmap(lambda x, places: x[places])(x, places)

"""A draft tree as arrays: which node follows which, what each sees, and the walk along it.

Node 0 is the root, the pending token; parents come before their children. Trees have a fixed number of nodes, so a
round is compiled once, whatever the draft proposes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.speculate.strategy import Strategy


class Candidates(NamedTuple):
    """All drafted tokens of a round (see `strategy` for their order).

    tokens: target ids. parents: candidate above, -1 for the root. scores: cumulative log probability, None if the tree
    is static. beams: [B, E], the candidates that were expanded. logits: [B, 1 + E, Vd], of the root and of each beam,
    from which their children were drawn; None unless drafts are sampled. finite: whether all the draft's logits were.
    """

    tokens: Int[Array, "B C"]
    parents: Int[Array, "B C"]
    scores: Float[Array, "B C"] | None
    beams: Int[Array, "B E"]
    logits: Float[Array, "B rows Vd"] | None
    finite: Bool[Array, "B"]


class Tree(NamedTuple):
    """The verified nodes, root first. parents: node above (the root's is 0). depth: 0 for the root.

    sees: sees[b, i, j] if j is node i or one of its ancestors. source: row of `Candidates.logits` from which the
    children of a node were drawn.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    sees: Bool[Array, "B N N"]
    source: Int[Array, "B N"]


def build_tree(strategy: Strategy, pending: Int[Array, "B"], candidates: Candidates) -> Tree:
    """The root and the verified candidates.

    A dynamic tree keeps the N - 1 candidates of the highest score. Scores never rise from parent to child and equal
    scores go to the lower number, so a kept node's ancestors are kept as well, under ties too.
    """
    batch, size = pending.shape[0], strategy.nodes
    if strategy.is_static:
        kept, parents = (_rows_of(numbers, batch) for numbers in (strategy.kept, strategy.parents))
    else:
        kept = jnp.sort(jax.lax.top_k(candidates.scores, size - 1)[1], axis=-1)
        parents = _parents(kept, candidates.parents)
    own = jnp.eye(size, dtype=bool)[None]
    sees = jnp.broadcast_to(own, (batch, size, size))
    for _ in range(strategy.depth):
        sees = own | jnp.take_along_axis(sees, parents[..., None], axis=1)
    tokens = jnp.concatenate([pending[:, None], jnp.take_along_axis(candidates.tokens, kept, axis=1)], axis=1)
    is_beam = kept[:, :, None] == candidates.beams[:, None, :]
    source = jnp.pad(jnp.where(is_beam, 1 + jnp.arange(is_beam.shape[-1]), 0).sum(-1), ((0, 0), (1, 0)))
    return Tree(tokens, parents, sees.sum(-1, dtype=jnp.int32) - 1, sees, source.astype(jnp.int32))


def _rows_of(numbers: tuple[int, ...], batch: int) -> Int[Array, "B n"]:
    return jnp.broadcast_to(jnp.asarray(numbers, jnp.int32), (batch, len(numbers)))


def _parents(kept: Int[Array, "B n"], above: Int[Array, "B C"]) -> Int[Array, "B N"]:
    """The parent node of each node, from the candidates that are kept and the candidate above each candidate."""
    batch, count = above.shape
    node_of = jnp.zeros((batch, count + 1), jnp.int32)  # one more: parent -1 of a candidate is the root, node 0
    node_of = jax.vmap(lambda row, at: row.at[at].set(jnp.arange(1, kept.shape[1] + 1)))(node_of, kept)
    parents = jnp.take_along_axis(node_of, jnp.take_along_axis(above, kept, axis=1), axis=1)
    return jnp.pad(parents, ((0, 0), (1, 0)))


def children(tree: Tree, node: Int[Array, "B"]) -> Bool[Array, "B N"]:
    """Which nodes are children of `node`; none of -1."""
    return (tree.parents == node[:, None]) & (jnp.arange(tree.parents.shape[1]) > 0)


def first(nodes: Bool[Array, "B N"]) -> Int[Array, "B"]:
    """The first of the marked nodes, -1 if none is."""
    return jnp.where(nodes.any(axis=1), jnp.argmax(nodes, axis=1), -1).astype(jnp.int32)


def at(rows: Array, index: Int[Array, "B"]) -> Array:
    """rows[b, index[b]] for each b; an index of -1 gives row 0."""
    index = jnp.maximum(index, 0).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]

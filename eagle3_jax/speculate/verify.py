"""The walk along a draft tree: from the root, the target chooses a token; if a child holds it, the walk goes on there.

Deterministic drafts are point masses (spec 7.3). The target's choice is drawn from its own distribution p, whatever
the children are, and a child is accepted exactly if it is that choice: lossless by construction, and the best that
point masses allow (a position is accepted with probability p(children)).

Sampled drafts: children x_1, x_2, ... of a node were drawn one after the other from q without replacement. Each is
accepted with probability min(1, p(x)/q(x)); after a rejection p becomes the residual max(p - q, 0) and q loses x, both
normalised; when no child is left the token comes from the residual (Leviathan et al. 2023; without replacement: Jeong
et al. 2024, Chen et al. 2024). q lives on the draft vocabulary and is scattered to the target's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.speculate.sampling import Sampling, accept_noise, choose, draw, observe, processed, warped
from eagle3_jax.speculate.strategy import Strategy
from eagle3_jax.speculate.tree import Tree, at, children, first


class Proposal(NamedTuple):
    """What sampled drafts were drawn from: logits of each `Tree.source`, and the target id of each draft id."""

    logits: Float[Array, "B rows Vd"]
    d2t: Int[Array, "Vd"]


class Walk(NamedTuple):
    """tokens[b, : accepted[b] + 1] are committed; path[b, : accepted[b] + 1] are the nodes that they follow.

    Beyond, both hold leftovers. drafts: the tokens of the accepted path and, from where it ends, of the first child
    each time, -1 where the tree ends before `depth`.
    """

    tokens: Int[Array, "B levels"]
    path: Int[Array, "B levels"]
    accepted: Int[Array, "B"]
    drafts: Int[Array, "B D"]
    sampling: Sampling | None


def walk(
    strategy: Strategy,
    tree: Tree,
    logits: Float[Array, "B N V"],
    length: Int[Array, "B"],
    sampling: Sampling | None,
    proposal: Proposal | None,
) -> Walk:
    """Verifies a tree by the target's logits at its nodes; node i lies at position length + depth of i."""
    batch = length.shape[0]
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32) if sampling is None else None

    def verified(node, depth, sampling):
        """The target's choice at a node, and the child that holds it, -1 if none does."""
        here, below, position = at(logits, node), children(tree, node), length + depth + 1
        if proposal is not None:
            return _accept(strategy, tree, here, node, below, position, sampling, proposal)
        token = at(greedy, node) if greedy is not None else choose(here, position, sampling)
        return token, first(below & (tree.tokens == token[:, None]))

    def step(carry, depth):
        node, alive, sampling = carry
        if greedy is not None:
            token, child = verified(node, depth, sampling)
        else:  # where all requests have ended the noise is spared
            nothing = jnp.zeros(batch, jnp.int32), jnp.full(batch, -1)
            token, child = jax.lax.cond(alive.any(), verified, lambda *_: nothing, node, depth, sampling)
        sampling = observe(sampling, token, alive)
        alive &= child >= 0
        following = jnp.where(alive, child, first(children(tree, node)))
        return (following, alive, sampling), (token, node, alive)

    # A loop, since the noise of one step takes long to compile.
    start = (jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool), sampling)
    (_, _, sampling), steps = jax.lax.scan(step, start, jnp.arange(strategy.depth + 1))
    tokens, path, alive = (x.swapaxes(0, 1) for x in steps)
    drafts = jnp.where(path[:, 1:] >= 0, jnp.take_along_axis(tree.tokens, jnp.maximum(path[:, 1:], 0), axis=1), -1)
    return Walk(tokens, jnp.maximum(path, 0), alive.sum(axis=1, dtype=jnp.int32), drafts, sampling)


def _accept(
    strategy: Strategy,
    tree: Tree,
    logits: Float[Array, "B V"],
    node: Int[Array, "B"],
    below: Bool[Array, "B N"],
    positions: Int[Array, "B"],
    sampling: Sampling,
    proposal: Proposal,
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """The next token and the child that holds it (-1: none, the token is the target's own), by the p/q rule."""
    random = sampling.random
    p = jax.nn.softmax(warped(processed(logits, positions, sampling), random), axis=-1)
    # A greedy request: the first of equal largest logits alone, as argmax chooses.
    p = jnp.where(random.is_random[:, None], p, jax.nn.one_hot(jnp.argmax(p, axis=-1), p.shape[-1]))
    q_logits = jnp.full_like(logits, -jnp.inf).at[:, proposal.d2t].set(at(proposal.logits, at(tree.source, node)))
    coins = accept_noise(random, positions, strategy.top_k)
    rows, accepted = jnp.arange(logits.shape[0]), jnp.full(logits.shape[0], -1)
    for offered in range(strategy.top_k):
        child = first(below)
        below = below & (jnp.arange(below.shape[1]) != child[:, None])
        open_ = (child >= 0) & (accepted < 0)
        x, q = at(tree.tokens, child), jax.nn.softmax(q_logits, axis=-1)
        yes = open_ & (coins[:, offered] * q[rows, x] < p[rows, x])
        accepted = jnp.where(yes, child, accepted)
        residual = jnp.maximum(p - q, 0)
        mass = residual.sum(axis=-1, keepdims=True)
        rejected = (open_ & ~yes)[:, None] & (mass > 0)  # no mass: p is q up to rounding, so p serves
        p = jnp.where(rejected, residual / jnp.where(mass > 0, mass, 1), p)
        q_logits = q_logits.at[rows, x].set(-jnp.inf)
    own = draw(jnp.log(p), positions, random)
    return jnp.where(accepted >= 0, at(tree.tokens, accepted), own), accepted

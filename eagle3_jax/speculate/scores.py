"""Log probabilities of committed tokens under the target's raw logits, before temperature and processors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MOST_LIKELIEST = 20  # log probabilities of so many tokens are computed where any are wanted


class Scores(NamedTuple):
    """logprob: of each token itself. top_ids, top_logprobs: of the likeliest tokens at its place, likeliest first."""

    logprob: Float[Array, "B rows"]
    top_ids: Int[Array, "B rows K"]
    top_logprobs: Float[Array, "B rows K"]


def scores(logits: Float[Array, "B rows V"], tokens: Int[Array, "B rows"], wanted: Bool[Array, "B"]) -> Scores:
    """Scores of tokens under the logits that they were chosen from; zeros, at no cost, where no request wants any."""
    kept = min(MOST_LIKELIEST, logits.shape[-1])

    def computed() -> Scores:
        likely = jax.nn.log_softmax(logits)
        top, ids = jax.lax.top_k(likely, kept)
        return Scores(jnp.take_along_axis(likely, tokens[..., None], axis=-1)[..., 0], ids, top)

    def nothing() -> Scores:
        shape = (*tokens.shape, kept)
        return Scores(jnp.zeros(tokens.shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))

    return jax.lax.cond(wanted.any(), computed, nothing)


def sound(logits: Float[Array, "B rows V"], count: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Whether the logits of the first `count` rows are all finite: if not, the tokens chosen from them mean nothing."""
    finite = jnp.isfinite(logits).all(axis=-1)
    return (finite | (jnp.arange(logits.shape[1]) >= count[:, None])).all(axis=1)

"""The target's choice of a token from its logits: argmax, or a sample after temperature, top-k and top-p.

A sample at absolute position p of a request uses noise keyed by (request seed, p) alone. So the same seed gives the
same text with and without speculation, alone or in a batch, whatever the block borders.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


class Sampling(NamedTuple):
    """Per request: key, temperature > 0, top_p in (0, 1], top_k (0 = off)."""

    key: Key[Array, "B"]
    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]


def choose(logits: Float[Array, "B R V"], positions: Int[Array, "B R"], sampling: Sampling | None) -> Int[Array, "B R"]:
    """int32 token ids; positions: the absolute position each chosen token will have. None = greedy."""
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.vmap(lambda key, places: jax.vmap(lambda p: jax.random.fold_in(key, p))(places))(sampling.key, positions)
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:])))(keys)
    return jnp.argmax(filtered(logits, sampling) + noise, axis=-1).astype(jnp.int32)


def filtered(logits: Float[Array, "B R V"], sampling: Sampling) -> Float[Array, "B R V"]:
    """Logits divided by the temperature, with everything outside top-k and then top-p at -inf.

    The likeliest token always stays; top_p 1 cuts nothing (a cumulative sum in float32 reaches 1 before the tail does).
    """
    scaled = logits / sampling.temperature[:, None, None]
    ordered = jnp.sort(scaled, axis=-1)[..., ::-1]
    vocabulary = logits.shape[-1]
    kept = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary)[:, None, None]
    within_k = jnp.arange(vocabulary) < kept
    probabilities = jax.nn.softmax(jnp.where(within_k, ordered, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_p = sampling.top_p[:, None, None]
    within = within_k & ((mass_before < top_p) | (top_p >= 1.0) | (jnp.arange(vocabulary) == 0))
    threshold = jnp.min(jnp.where(within, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)

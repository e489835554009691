"""From the target's logits to a token: processors, the warped distribution, and the choice (argmax or a sample).

Order, as in vLLM: logit bias, minimum length, penalties, then temperature, min-p, top-k, top-p. All are a request's
own and all act on every token of a block, each with the tokens before it in the block counted. Fields that no request
of a batch uses are None and cost nothing.

A sample at absolute position p of a request uses noise keyed by (request seed, p) alone. So the same seed gives the
same text with and without speculation (unless drafts are sampled), alone or in a batch, whatever the block borders.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

_DRAFT, _ACCEPT = 2**32 - 1, 2**32 - 2  # streams of noise beside that of positions


class Random(NamedTuple):
    """Per request: key; temperature, 0 = greedy; top_k (0 = off), top_p in (0, 1], min_p in [0, 1) or None."""

    key: Key[Array, "B"]
    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"] | None = None
    top_p: Float[Array, "B"] | None = None
    min_p: Float[Array, "B"] | None = None

    @property
    def is_random(self) -> Bool[Array, "B"]:
        return self.temperature > 0

    @property
    def draft_temperature(self) -> Float[Array, "B"]:
        """Temperature at which sampled drafts are drawn: the request's; 1 for a greedy request, where it is moot."""
        return jnp.where(self.is_random, self.temperature, 1.0)


class Penalties(NamedTuple):
    """Repetition (over prompt and answer, HF), presence and frequency (over the answer, OpenAI).

    prompt: tokens that occur in the prompt; counts: of the answer so far, the pending token included.
    """

    repetition: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]
    prompt: Bool[Array, "B V"]
    counts: Int[Array, "B V"]


class MinTokens(NamedTuple):
    """No token of `stops` may be chosen at a position before `until`."""

    until: Int[Array, "B"]
    stops: Bool[Array, "B V"]


class Sampling(NamedTuple):
    """Settings and state of a batch; None stands for all greedy and no processors. bias is added to the logits."""

    random: Random | None = None
    penalties: Penalties | None = None
    bias: Float[Array, "B V"] | None = None
    min_tokens: MinTokens | None = None


def choose(logits: Float[Array, "B V"], positions: Int[Array, "B"], sampling: Sampling | None) -> Int[Array, "B"]:
    """int32 token ids; positions: the absolute position each chosen token will have. None = greedy."""
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = processed(logits, positions, sampling)
    if sampling.random is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return draw(warped(logits, sampling.random), positions, sampling.random)


def draw(log_weights: Float[Array, "B V"], positions: Int[Array, "B"], random: Random) -> Int[Array, "B"]:
    """A sample of softmax(log_weights) by the noise of each position (Gumbel-max); the argmax for greedy requests."""
    keys = jax.vmap(jax.random.fold_in)(random.key, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, log_weights.shape[-1:]))(keys)
    noisy = jnp.where(random.is_random[:, None], log_weights + noise, log_weights)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def observe(sampling: Sampling | None, tokens: Int[Array, "B"], committed: Bool[Array, "B"]) -> Sampling | None:
    """The state after one more token of each request; requests that are not `committed` keep theirs."""
    if sampling is None or sampling.penalties is None:
        return sampling
    counts = sampling.penalties.counts
    counts = counts.at[jnp.arange(counts.shape[0]), tokens].add(committed.astype(counts.dtype))
    return sampling._replace(penalties=sampling.penalties._replace(counts=counts))


def processed(logits: Float[Array, "B V"], positions: Int[Array, "B"], sampling: Sampling) -> Float[Array, "B V"]:
    """Logits after bias, minimum length and penalties."""
    if sampling.bias is not None:
        logits = logits + sampling.bias
    if (rule := sampling.min_tokens) is not None:
        logits = jnp.where((positions < rule.until)[:, None] & rule.stops, -jnp.inf, logits)
    if (penalties := sampling.penalties) is not None:
        repetition, presence, frequency = (p[:, None] for p in penalties[:3])
        counts = penalties.counts
        scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(penalties.prompt | (counts > 0), scaled, logits)
        logits = logits - frequency * counts - presence * (counts > 0)
    return logits


def warped(logits: Float[Array, "B V"], random: Random) -> Float[Array, "B V"]:
    """Logits divided by the temperature, with everything outside min-p, top-k and top-p at -inf.

    The likeliest token always stays, and so does what equals the last token kept; top_p 1 cuts nothing. Greedy requests
    keep their largest logits alone.
    """
    # A large bias over a small temperature is infinite, of which a softmax would make NaN.
    scaled = jnp.minimum(logits / random.draft_temperature[:, None], jnp.finfo(logits.dtype).max)
    largest = jnp.max(scaled, axis=-1, keepdims=True)
    least = jnp.where(random.is_random[:, None], -jnp.inf, largest)
    if random.min_p is not None:
        # log 0 = -inf: off.
        least = jnp.maximum(least, largest + jnp.log(random.min_p)[:, None])
    if random.top_k is not None or random.top_p is not None:
        kept = jnp.where(scaled >= least, scaled, -jnp.inf)
        off = jnp.full_like(largest, -jnp.inf)
        least = jnp.maximum(least, jax.lax.cond(_sorts(random), lambda: _least_kept(kept, random), lambda: off))
    return jnp.where(scaled >= least, scaled, -jnp.inf)


def _sorts(random: Random) -> Bool[Array, ""]:
    """Whether any request has top-k or top-p on; sorting a vocabulary for nothing is dear on CPU."""
    top_k = jnp.zeros((), bool) if random.top_k is None else (random.top_k > 0).any()
    return top_k if random.top_p is None else top_k | (random.top_p < 1).any()


def _least_kept(scaled: Float[Array, "B V"], random: Random) -> Float[Array, "B 1"]:
    """A bound that keeps what is inside top-k and, of that, inside top-p: tokens above which there are fewer than k,
    and of less total probability than p."""
    least = jnp.full_like(scaled[:, :1], -jnp.inf)
    if random.top_k is not None:
        count = jnp.where(random.top_k > 0, random.top_k, jnp.inf)
        least = _bound(scaled, jnp.ones_like(scaled), count[:, None])
    if random.top_p is not None:
        probabilities = jax.nn.softmax(jnp.where(scaled >= least, scaled, -jnp.inf), axis=-1)
        mass = jnp.where(random.top_p < 1, random.top_p, jnp.inf)
        least = jnp.maximum(least, _bound(scaled, probabilities, mass[:, None]))
    return least


def _bound(
    values: Float[Array, "B V"], weights: Float[Array, "B V"], limit: Float[Array, "B 1"]
) -> Float[Array, "B 1"]:
    """The smallest float above which the weights of the values sum to less than `limit` > 0.

    Found by halving the range of floats 32 times, on the integers that order as they do; sorting takes much longer.
    """

    def ordered(bits):  # its own inverse
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    numbers = ordered(jax.lax.bitcast_convert_type(values, jnp.int32))

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)
        above = jnp.sum(jnp.where(numbers > middle, weights, 0), axis=-1, keepdims=True)
        fits = above < limit
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    ends = numbers.min(axis=-1, keepdims=True), numbers.max(axis=-1, keepdims=True)
    return jax.lax.bitcast_convert_type(ordered(jax.lax.fori_loop(0, 32, halve, ends)[1]), jnp.float32)


def draft_noise(random: Random, length: Int[Array, "B"], shape: tuple[int, int]) -> Float[Array, "B rows Vd"]:
    """Gumbel noise for the draft's draws in the round that begins at `length`, [rows, Vd] a request; zero for greedy
    ones. No two rounds of a request share it."""

    def noise(key, at):
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, _DRAFT), at), shape)

    return jnp.where(random.is_random[:, None, None], jax.vmap(noise)(random.key, length), 0.0)


def accept_noise(random: Random, positions: Int[Array, "B"], count: int) -> Float[Array, "B count"]:
    """Uniform numbers in [0, 1) that decide on `count` draft tokens offered for each position."""
    keys = jax.vmap(lambda key, at: jax.random.fold_in(jax.random.fold_in(key, _ACCEPT), at))(random.key, positions)
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys)

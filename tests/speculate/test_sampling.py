"""Sampling: the filtered distribution, that samples follow it, and that noise depends on request and place alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.speculate.drafting import _continuations
from eagle3_jax.speculate.sampling import Random, Sampling, choose, warped
from eagle3_jax.speculate.strategy import parse_strategy, with_sampled_drafts

LOGITS = np.array([2.0, 1.0, 0.5, 0.4, 0.0, -1.0, -1.5, -3.0])[[3, 0, 6, 1, 7, 2, 5, 4]]  # not sorted
SAMPLES = 100_000
SETTINGS = [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 1.0, 3), (1.5, 0.8, 5), (0.7, 0.05, 0), (2.0, 1.0, 100)]

compiled_choose = jax.jit(choose)  # operation by operation it takes longer


def expected(temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Temperature, then top-k, then top-p over what is left (the smallest set that holds at least top_p)."""
    scaled = LOGITS / temperature
    order = np.argsort(-scaled)
    order = order[: top_k or None]
    p = np.exp(scaled[order] - scaled.max())
    p /= p.sum()
    keep = 1
    while p[:keep].sum() < top_p and keep < len(p):
        keep += 1
    out = np.zeros(len(LOGITS))
    out[order[:keep]] = p[:keep] / p[:keep].sum()
    return out


def random_for(keys, temperature: float, top_p: float, top_k: int, min_p: float = 0.0) -> Random:
    rows = len(keys)
    limits = jnp.full(rows, top_k), jnp.full(rows, top_p), jnp.full(rows, min_p)
    return Random(keys, jnp.full(rows, temperature), *limits)


def keys_of(*seeds: int):
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def row(logits=LOGITS):
    return jnp.asarray(logits, jnp.float32)[None]


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
def test_warped_logits_are_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    got = jax.nn.softmax(warped(row(), random_for(keys_of(0), temperature, top_p, top_k)))[0]
    np.testing.assert_allclose(got, expected(temperature, top_p, top_k), atol=1e-6)


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    p = np.exp(LOGITS / 0.7 - max(LOGITS) / 0.7)
    kept = np.asarray(warped(row(), random_for(keys_of(0), 0.7, 1.0, 0, 0.15)))[0] > -np.inf
    assert kept.tolist() == (p >= 0.15).tolist() and 1 < kept.sum() < len(p)


@pytest.fixture(scope="module")
def draw():
    """Samples at SAMPLES places of one request, compiled once."""
    places, logits = jnp.arange(SAMPLES), jnp.repeat(row(), SAMPLES, axis=0)
    compiled = jax.jit(lambda random: choose(logits, places, Sampling(random)))
    return lambda *settings, seed=0: np.asarray(compiled(random_for(keys_of(*[seed] * SAMPLES), *settings)))


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS[1:4])
def test_samples_follow_the_distribution(draw, temperature: float, top_p: float, top_k: int) -> None:
    wanted = expected(temperature, top_p, top_k)
    frequency = np.bincount(draw(temperature, top_p, top_k), minlength=len(LOGITS)) / SAMPLES
    assert 0.5 * np.abs(frequency - wanted).sum() < 0.01  # total variation
    assert (frequency[wanted == 0] == 0).all()


def test_neighbouring_places_and_seeds_are_independent(draw) -> None:
    wanted = expected(1.0, 1.0, 3)
    one, two = draw(1.0, 1.0, 3), draw(1.0, 1.0, 3, seed=1)
    for first, second in ((one[:-1], one[1:]), (one, two)):
        joint = np.bincount(first * len(LOGITS) + second, minlength=len(LOGITS) ** 2) / len(first)
        assert 0.5 * np.abs(joint - np.outer(wanted, wanted).ravel()).sum() < 0.02


def test_noise_depends_on_request_and_place_alone() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 50)), jnp.float32)
    places = jnp.asarray([5, 6, 7])
    together = compiled_choose(logits, places, Sampling(random_for(keys_of(3, 4, 5), 1.0, 0.9, 0)))
    for i, seed in enumerate((3, 4, 5)):
        alone = compiled_choose(logits[i : i + 1], places[i : i + 1], Sampling(random_for(keys_of(seed), 1.0, 0.9, 0)))
        assert alone[0] == together[i]


def test_settings_are_each_requests_own(draw) -> None:
    """Top-1, greedy, and free requests in one batch."""
    rows = 300
    random = random_for(keys_of(*range(rows)), 1.0, 1.0, 0)
    random = random._replace(
        top_k=jnp.where(jnp.arange(rows) < 100, 1, 0), temperature=jnp.where(jnp.arange(rows) < 200, 0.0, 1.0)
    )
    chosen = np.asarray(compiled_choose(jnp.repeat(row(), rows, axis=0), jnp.arange(rows), Sampling(random)))
    assert set(chosen[:200]) == {int(np.argmax(LOGITS))} and len(set(chosen[200:])) > 4


SICK = [
    np.full(4, np.nan),
    [np.nan, 1.0, np.nan, np.nan],
    [0.3, -np.inf, 0.0, np.inf],
    [9e8, 9e8, 0.0, 1.0],
    [1e38, 0, 0, 0],
]


@pytest.mark.parametrize("logits", SICK, ids=str)
def test_drafts_are_drawn_from_the_logits_that_they_are_verified_by(logits) -> None:
    """Two draws without replacement, also where logits are not finite, or so large that noise is lost in them."""
    shape = with_sampled_drafts(parse_strategy("tree:1x2x3"))
    random = random_for(keys_of(0), 0.7, 1.0, 0)
    noise = jax.random.gumbel(jax.random.key(0), (1, SAMPLES, 4))
    given = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), noise.shape)
    ids, _, used = _continuations(given, shape, random, noise)
    assert (used == used[:, :1]).all()
    first = jax.nn.softmax(used[0, 0])
    second = jax.nn.softmax(jnp.where(jnp.eye(4, dtype=bool), -jnp.inf, used[0, 0]))  # as verification does it
    wanted = first[:, None] * second
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(np.asarray(ids[0]).T), 1)
    assert 0.5 * np.abs(counts / SAMPLES - wanted).sum() < 0.01


def test_greedy_is_the_first_largest() -> None:
    logits, place = jnp.asarray([[0.0, 3.0, 3.0, 1.0]]), jnp.zeros(1, jnp.int32)
    assert compiled_choose(logits, place, None).tolist() == [1]
    assert compiled_choose(logits, place, Sampling(random_for(keys_of(0), 0.0, 0.5, 3))).tolist() == [1]

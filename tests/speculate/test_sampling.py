"""Sampling: the filtered distribution, that samples follow it, and that noise depends on request and place alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.speculate.generate import sampling_for
from eagle3_jax.speculate.sampling import choose, filtered

LOGITS = np.array([2.0, 1.0, 0.5, 0.4, 0.0, -1.0, -1.5, -3.0])[[3, 0, 6, 1, 7, 2, 5, 4]]  # not sorted
SAMPLES = 100_000
SETTINGS = [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 1.0, 3), (1.5, 0.8, 5), (0.7, 0.05, 0), (2.0, 1.0, 100)]


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


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
def test_filtered_logits_are_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    sampling = sampling_for([0], temperature, top_p, top_k)
    got = jax.nn.softmax(filtered(jnp.asarray(LOGITS, jnp.float32)[None, None], sampling))[0, 0]
    np.testing.assert_allclose(got, expected(temperature, top_p, top_k), atol=1e-6)


@pytest.fixture(scope="module")
def draw():
    """Samples at SAMPLES places of one request, compiled once."""
    places = jnp.arange(SAMPLES)[None]
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (1, SAMPLES, len(LOGITS)))
    compiled = jax.jit(lambda sampling: choose(logits, places, sampling)[0])
    return lambda *settings, seed=0: np.asarray(compiled(sampling_for([seed], *settings)))


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
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 50)), jnp.float32)
    places = jnp.asarray([[5, 6, 7, 8]] * 3)
    compiled = jax.jit(choose)
    together = compiled(logits, places, sampling_for([3, 4, 5], 1.0, 0.9, 0))
    for i, seed in enumerate((3, 4, 5)):
        alone = compiled(logits[i : i + 1, 2:], places[:1, 2:], sampling_for([seed], 1.0, 0.9, 0))
        np.testing.assert_array_equal(alone[0], together[i, 2:])


def test_settings_are_each_requests_own() -> None:
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (2, 400, len(LOGITS)))
    sampling = sampling_for([0, 1], 1.0, 1.0, 0)._replace(top_k=jnp.asarray([1, 0]))
    chosen = np.asarray(jax.jit(choose)(logits, jnp.broadcast_to(jnp.arange(400), (2, 400)), sampling))
    assert set(chosen[0]) == {int(np.argmax(LOGITS))} and len(set(chosen[1])) > 4


def test_greedy_is_the_first_largest() -> None:
    logits = jnp.asarray([[[0.0, 3.0, 3.0, 1.0]]])
    assert choose(logits, jnp.zeros((1, 1), jnp.int32), None).tolist() == [[1]]
    assert sampling_for([1, 2], 0.0, 0.5, 3) is None

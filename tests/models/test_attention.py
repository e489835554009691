"""Attention over a cache: what is masked has no influence, whatever it holds."""

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.models.attention import cached, empty_cache


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

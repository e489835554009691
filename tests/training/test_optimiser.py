"""AdamW against numpy, Muon on matrices alone, schedules, and float32 masters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eagle3_jax.config import OptimiserConfig
from eagle3_jax.training import trainer
from eagle3_jax.training.dataset import make_batch
from eagle3_jax.training.optimiser import learning_rate_factor, make_optimiser
from eagle3_jax.training.step import train_step


def small_params() -> dict:
    rng = np.random.default_rng(0)
    names = {"fc": (4, 6), "lm_head": (5, 4), "norm": (4,)}
    params = {name: {"weight": jnp.asarray(rng.standard_normal(shape), jnp.float32)} for name, shape in names.items()}
    block = {"q_proj": {"weight": jnp.asarray(rng.standard_normal((4, 8)), jnp.float32)}}
    return params | {"layers": {0: {"self_attn": block, "norm": {"weight": jnp.ones(4)}}}}


def gradients_like(params: dict, seed: int, size: float) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape) * size, jnp.float32), params)


@pytest.mark.parametrize("size", [1e-3, 10.0])  # below and above the clip
def test_adamw_with_clipping_is_the_textbook_step(size) -> None:
    config = OptimiserConfig(learning_rate=0.01, betas=(0.8, 0.95), weight_decay=0.1, clip=0.5)
    optimiser, params = make_optimiser(config), small_params()
    state = optimiser.init(params)
    expected = [np.asarray(p, np.float64) for p in jax.tree.leaves(params)]
    first, second = ([np.zeros(p.shape) for p in expected] for _ in range(2))
    for step in range(1, 4):
        gradients = gradients_like(params, step, size)
        updates, state = optimiser.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        leaves = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradients)]
        norm = math.sqrt(sum((g**2).sum() for g in leaves))
        for i, g in enumerate(leaves):
            g = g * min(1.0, 0.5 / norm)
            first[i] = 0.8 * first[i] + 0.2 * g
            second[i] = 0.95 * second[i] + 0.05 * g**2
            direction = first[i] / (1 - 0.8**step) / (np.sqrt(second[i] / (1 - 0.95**step)) + 1e-8)
            expected[i] = expected[i] - 0.01 * (direction + 0.1 * expected[i])
    for got, want in zip(jax.tree.leaves(params), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def muon_step(**changes) -> tuple[dict, dict]:
    params = small_params()
    optimiser = make_optimiser(OptimiserConfig(**({"name": "muon", "clip": 1e6} | changes)))
    updates, _ = optimiser.update(gradients_like(params, 1, 1.0), optimiser.init(params), params)
    return params, updates


def test_muon_updates_the_matrices_of_fc_and_blocks_alone() -> None:
    _, one = muon_step(muon_learning_rate=1e-3)
    _, two = muon_step(muon_learning_rate=2e-3)
    for name, leaf in {"fc": one["fc"], "q": one["layers"][0]["self_attn"]["q_proj"]}.items():
        other = two["fc"] if name == "fc" else two["layers"][0]["self_attn"]["q_proj"]
        np.testing.assert_allclose(2 * leaf["weight"], other["weight"], rtol=1e-5)
        spectrum = np.linalg.svd(np.asarray(leaf["weight"]), compute_uv=False)
        assert spectrum.min() > 0.5 * spectrum.max()  # orthogonalised
    for a, b in ((one["lm_head"], two["lm_head"]), (one["norm"], two["norm"])):
        np.testing.assert_array_equal(a["weight"], b["weight"])
    np.testing.assert_array_equal(one["layers"][0]["norm"]["weight"], two["layers"][0]["norm"]["weight"])
    _, faster = muon_step(learning_rate=2e-4)
    np.testing.assert_allclose(2 * one["lm_head"]["weight"], faster["lm_head"]["weight"], rtol=1e-5)
    np.testing.assert_array_equal(one["fc"]["weight"], faster["fc"]["weight"])


def test_muon_decays_all_weights() -> None:
    params, plain = muon_step()
    _, decayed = muon_step(weight_decay=0.1)
    for name, rate in {"fc": 1e-3, "lm_head": 1e-4}.items():
        shrink = np.asarray(decayed[name]["weight"] - plain[name]["weight"])
        np.testing.assert_allclose(shrink, -rate * 0.1 * np.asarray(params[name]["weight"]), rtol=1e-2, atol=1e-8)


def test_schedules() -> None:
    def factors(**changes) -> list[float]:
        config = OptimiserConfig(**({"warmup": 0.2} | changes))
        return [round(learning_rate_factor(config, progress), 6) for progress in (0.0, 0.1, 0.2, 0.6, 1.0, 1.3)]

    assert factors(schedule="cosine") == [0.01, 0.5, 1.0, 0.5, 0.0, 0.0]
    assert factors(schedule="linear") == [0.01, 0.5, 1.0, 0.5, 0.0, 0.0]
    assert factors(schedule="constant") == [0.01, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert factors(schedule="linear", warmup=0.0)[0] == 1.0
    assert factors(warmup=1.0)[3] == 0.6
    cosine = learning_rate_factor(OptimiserConfig(warmup=0.2), 0.4)
    assert cosine == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))


def test_masters_and_moments_are_float32_even_when_computing_in_bfloat16(world, tmp_path) -> None:
    config = world.config(tmp_path, training={"compute_dtype": "bfloat16"})
    run = trainer.prepare(config, config.run_dir, world.target, None, lambda line: None)
    state, _, _ = trainer._start(run, lambda line: None)
    before = jax.tree.map(np.asarray, state.trainable)
    batch = make_batch(run.train, [0, 1], 2)
    # A rate so small that a bfloat16 weight would not move.
    state, outcome = train_step(run.setup, run.frozen, state, batch, None, jnp.float32(1e-3))
    run.checkpoints.close()
    floats = [a for a in jax.tree.leaves(state) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert len(floats) == 3 * len(jax.tree.leaves(before)) and {a.dtype for a in floats} == {jnp.dtype("float32")}
    assert np.isfinite(outcome.loss)
    moved = np.abs(np.asarray(state.trainable["norm"]["weight"]) - before["norm"]["weight"])
    assert 0 < moved.max() < 1e-4

"""Options of the loss and the step: each does what it says, and none that promises the same result changes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.config import Config, load_config
from eagle3_jax.errors import UserError
from eagle3_jax.taps import LastHidden
from eagle3_jax.training import prepare, step, trainer
from eagle3_jax.training.dataset import make_batch
from eagle3_jax.training.features import choices
from eagle3_jax.training.loss import LossOptions, Teacher, divergence, overlap, slot_masks
from eagle3_jax.training.optimiser import learning_rate_factor
from eagle3_jax.training.step import TrainState, compute_features, train_step
from tests.training.conftest import read_metrics

VOCAB, DRAFT = 9, (0, 2, 3, 7)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Full target logits [6, V], draft logits [6, Vd], and both distributions' definition: p over V, q over Vd."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((6, VOCAB)) * 2, rng.standard_normal((6, len(DRAFT))) * 2


def test_divergences_are_those_of_their_definitions(rows) -> None:
    full, draft = rows
    p = np.exp(full) / np.exp(full).sum(-1, keepdims=True)
    q = np.exp(draft) / np.exp(draft).sum(-1, keepdims=True)
    inside = p[:, DRAFT]
    renormalised = inside / inside.sum(-1, keepdims=True)
    accepted = np.minimum(inside, q).sum(-1)
    kl = (renormalised * np.log(renormalised / q)).sum(-1)
    weight = np.exp(-2.0 * accepted)
    expected = {
        "kl": kl,
        "ce": -(renormalised * np.log(q)).sum(-1),
        "hard_ce": -np.log(q[np.arange(6), inside.argmax(-1)]),
        "lk_alpha": -np.log(accepted),
        "lk_lambda": weight * kl + (1 - weight) * (1 - accepted),
    }
    target, normaliser = jnp.asarray(full[:, DRAFT], jnp.float32), jnp.log(jnp.exp(full).sum(-1))
    logits = jnp.asarray(draft, jnp.float32)
    np.testing.assert_allclose(overlap(target, normaliser, logits), accepted, rtol=1e-5)
    gradients = {}
    for kind, values in expected.items():
        options = LossOptions(kind, lk_decay=2.0)
        np.testing.assert_allclose(divergence(options, target, normaliser, logits), values, rtol=1e-4)
        gradients[kind] = jax.grad(lambda x, o=options: divergence(o, target, normaliser, x).sum())(logits)
    np.testing.assert_allclose(gradients["kl"], gradients["ce"], atol=1e-6)
    for kind in ("hard_ce", "lk_alpha", "lk_lambda"):
        assert np.abs(gradients[kind] - gradients["kl"]).max() > 1e-2


def test_slots_whose_choice_the_draft_cannot_say_are_left_out_on_request() -> None:
    mask, documents = jnp.ones((1, 6), bool), jnp.zeros((1, 6), jnp.int32)
    teacher = Teacher(None, covered=jnp.asarray([[True, True, False, True, False, True]]))
    for options, expected in (
        (LossOptions(), [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        (LossOptions(skip_uncovered=True), [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]),  # of token t+1+s
        (LossOptions("hard_ce"), [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]),
    ):
        np.testing.assert_array_equal(slot_masks(options, teacher, mask, documents, 2)[:, 0], expected)


@pytest.fixture(scope="module")
def prepared(world, tmp_path_factory):
    """A run that is ready to step, with the features of its first four rows."""
    config = world.config(tmp_path_factory.mktemp("options"), training={"batch_rows": 4})
    run = trainer.prepare(config, config.run_dir, world.target, None, lambda line: None)
    batch = make_batch(run.train, [0, 1, 2], 4)  # the last row is padding
    yield run, batch, compute_features(run.setup, run.frozen, batch)
    run.checkpoints.close()


def stepped(prepared, steps: int = 2, **changes) -> tuple[TrainState, list]:
    run, batch, features = prepared
    loss = LossOptions("hard_ce", 0.5, feature=0.3)  # its slots are others than those of the feature loss
    setup, outcomes = run.setup._replace(loss=loss, **changes), []
    trainable = jax.tree.map(lambda p: jnp.array(p, jnp.float32), {k: run.draft.params[k] for k in ("fc", "norm")})
    trainable |= jax.tree.map(jnp.array, {k: v for k, v in run.draft.params.items() if k in ("layers", "lm_head")})
    average = None if setup.ema is None else jax.tree.map(jnp.array, trainable)
    state = TrainState(trainable, setup.optimiser.init(trainable), jnp.zeros((), jnp.int32), average)
    for _ in range(steps):
        state, outcome = train_step(setup, run.frozen, state, batch, features, jnp.float32(1.0))
        outcomes.append(outcome)
    return state, outcomes


@pytest.fixture(scope="module")
def plain(prepared) -> tuple[TrainState, list]:
    return stepped(prepared)


def test_parts_rematerialisation_and_averaging_change_no_weight(prepared, plain) -> None:
    state, outcomes = stepped(prepared, accumulate=2, remat=True, ema=0.05)
    for got, expected in zip(jax.tree.leaves(state.trainable), jax.tree.leaves(plain[0].trainable), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    for got, expected in zip(outcomes, plain[1], strict=True):
        np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-5)
        np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-5)
        np.testing.assert_allclose(got.grad_norm, expected.grad_norm, rtol=1e-4)
        np.testing.assert_array_equal(got.hits, expected.hits)
        np.testing.assert_array_equal(got.counts, expected.counts)
    # The average follows the weights: 5 % of the old one, and at the first steps 10 % and 18 %, so here always 5 %.
    first = stepped(prepared, steps=1, accumulate=2, remat=True, ema=0.05)[0]
    for average, before, now in zip(
        *(jax.tree.leaves(t) for t in (state.average, first.average, state.trainable)), strict=True
    ):
        np.testing.assert_allclose(average, 0.05 * before + 0.95 * now, rtol=1e-4, atol=1e-6)
    assert state.weights is state.average and plain[0].weights is plain[0].trainable


def test_parts_run_the_target_once(prepared, monkeypatch) -> None:
    """Also where the slots to average over depend on what the target chose."""
    run, batch, features = prepared
    real, calls = step.run_target, []
    monkeypatch.setattr(step, "run_target", lambda *given: calls.append(0) or real(*given))
    setup = run.setup._replace(loss=LossOptions(skip_uncovered=True), accumulate=2)
    train_step.trace(setup, run.frozen, trainer.fresh_state(run), batch, None, jnp.float32(1.0))
    assert len(calls) == 1


def test_noise_on_the_features_is_that_of_the_seed_and_step(prepared, plain) -> None:
    once, again = (stepped(prepared, noise=0.5, seed=3)[1] for _ in range(2))
    assert [float(o.loss) for o in once] == [float(o.loss) for o in again]
    assert abs(float(once[0].loss) - float(plain[1][0].loss)) > 1e-4


def test_full_vocabulary_logits_in_chunks_are_those_at_once(world, prepared) -> None:
    run, batch, features = prepared
    model = run.setup.target.merge(run.frozen.target)
    last = LastHidden(features.last.array[:, :50], features.last.normed)
    wanted = jnp.asarray(batch.loss_mask[:, :50])
    logits = np.asarray(model.logits(last))[wanted]
    for chunk, groups in ((7, 1), (5, 2), (1024, 1)):  # of all rows together, of each half of them
        argmax, normaliser = jax.jit(lambda c=chunk, g=groups: choices(model, last, wanted, c, g))()
        np.testing.assert_array_equal(argmax[wanted], np.argmax(logits, axis=-1))
        assert (argmax[~wanted] == -1).all() and wanted.any()
        np.testing.assert_allclose(normaliser[wanted], jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)


def test_the_stable_schedule_falls_at_the_end_and_rates_end_where_they_shall(world, tmp_path) -> None:
    config = world.config(tmp_path, optimiser={"schedule": "wsd", "warmup": 0.1, "decay": 0.2, "final_rate": 0.5})
    factors = [learning_rate_factor(config.optimiser, progress) for progress in (0.05, 0.1, 0.8, 0.9, 1.0)]
    np.testing.assert_allclose(factors, [0.5, 1.0, 1.0, 0.75, 0.5])


def test_parts_must_be_equal(world, tmp_path) -> None:
    raw = world.config(tmp_path).model_dump()
    with pytest.raises(ValueError, match="training.accumulate must divide it"):
        Config.model_validate(raw | {"training": raw["training"] | {"accumulate": 3}})


PRESETS = ("paper", "specforge", "speculators", "eagle3.1")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run(world, tmp_path, name) -> None:
    """Twenty steps of each on tiny shapes: one draft step instead of up to seven, everything else as it is."""
    overrides = [f"runs_dir={tmp_path}", f"target.path={world.folder}", "target.dtype=float32", "data.length=96"]
    overrides += [f"data.train={world.few}", f"data.heldout={world.heldout}", "draft.taps=[1,2,4]"]
    overrides += ["training.ttt_steps=1", "training.evaluate_steps=1", "training.compute_dtype=float32"]
    overrides += ["training.epochs=5", "training.batch_rows=2", "training.features=ram", "evaluation.count=0"]
    config = load_config(f"configs/{name}.yaml", overrides)
    trainer.train(config, target=world.target)
    metrics = read_metrics(config.run_dir)
    assert len(metrics) == 20 and all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in metrics)
    rates = [row["learning_rate"] / config.optimiser.learning_rate for row in metrics]
    assert rates[-1] < 0.2 and max(rates) > 0.8
    assert metrics[-1]["heldout"]["simulated_tau"] >= 1


def test_presets_say_whom_they_follow() -> None:
    for name in PRESETS:
        config = load_config(f"configs/{name}.yaml")
        assert config.name == name
    with pytest.raises(UserError, match="unknown config key loss.kid / did you mean loss.kind"):
        load_config("configs/paper.yaml", ["loss.kid=kl"])


def test_on_a_cpu_parts_are_small(world, tmp_path) -> None:
    def parts(**values) -> int:
        return prepare._parts(world.config(tmp_path, data={"length": 512}, training=values))

    assert parts(batch_rows=2) == 1 and parts(batch_rows=4) == 2 and parts(batch_rows=4, accumulate=4) == 4
    assert parts(batch_rows=3) == 3  # two rows and one would be uneven

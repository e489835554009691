"""The target's side of a batch: taps, teacher and choice, and that keeping them in memory changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.taps import LastHidden, WiringError
from eagle3_jax.training import trainer
from eagle3_jax.training.dataset import make_batch
from eagle3_jax.training.features import FeatureCache, complete, teacher
from eagle3_jax.training.step import compute_features, evaluate_batch
from eagle3_jax.training.visit import CHUNK
from tests.tiny import relative


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    config = world.config(tmp_path_factory.mktemp("features"))
    run = trainer.prepare(config, config.run_dir, world.target, None, lambda line: None)
    yield run
    run.checkpoints.close()


def evaluated(run, batch, features=None):
    trainable = {key: value for key, value in run.draft.params.items() if key != "embed_tokens"}
    return evaluate_batch(run.setup._replace(steps=3), run.frozen, trainable, batch, features)


def documents(batch):
    """(row, slice) of every document of a batch."""
    for row, ids in enumerate(batch.document_ids):
        for number in sorted(set(ids.tolist()) - {-1}):
            inside = np.flatnonzero(ids == number)
            yield row, slice(inside[0], inside[-1] + 1)


def test_features_are_those_of_each_document_alone(world, run) -> None:
    batch = make_batch(run.train, [0, 1], 2)
    features = compute_features(run.setup, run.frozen, batch)
    made = teacher(run.setup.target, run.frozen.target, features, run.frozen.d2t)
    places = list(documents(batch))
    assert len(places) > 2
    width = max(place.stop - place.start for _, place in places)
    ids = np.zeros((len(places), width), np.int32)
    for i, (row, place) in enumerate(places):
        ids[i, : place.stop - place.start] = batch.ids[row, place]
    alone = world.target.forward(ids, taps=run.draft.taps)  # causal: what is padded behind changes nothing
    for i, (row, place) in enumerate(places):
        size = place.stop - place.start
        for got, expected in zip(features.taps.arrays, alone.taps.arrays, strict=True):
            assert relative(got[row, place], expected[i, :size]) < 1e-5
        assert relative(features.last.before_norm()[row, place], alone.last_hidden[i, :size]) < 1e-5
        # The norm's weights are far from one, so that normed twice or not at all would be far off.
        logits = made.logits(made.states[row, place])
        assert relative(logits, alone.logits[i, :size][:, run.draft.d2t]) < 1e-5
        chosen = np.where(batch.loss_mask[row, place], np.argmax(alone.logits[i, :size], axis=-1), -1)
        np.testing.assert_array_equal(made.argmax[row, place], chosen)


def largest(jaxpr) -> int:
    """Elements of the largest array that a program makes."""
    sizes = [var.aval.size for equation in jaxpr.eqns for var in equation.outvars]
    inner = [x for e in jaxpr.eqns for p in e.params.values() for x in (p if isinstance(p, tuple | list) else [p])]
    return max([*sizes, *(largest(getattr(x, "jaxpr", x)) for x in inner if hasattr(getattr(x, "jaxpr", x), "eqns"))])


def test_logits_of_long_rows_over_large_vocabularies_never_exist_at_once(world, run) -> None:
    rows, length, vocab, hidden = 2, 4096, 151936, world.target.config.hidden_size
    params = {**world.target.params, "lm_head": {"weight": jnp.zeros((vocab, hidden))}}
    graph, taps = world.target.graph, compute_features(run.setup, run.frozen, make_batch(run.train, [0, 1], 2)).taps
    wanted = jnp.ones((rows, length), bool)
    made = jax.make_jaxpr(lambda array: complete(graph, params, taps, LastHidden(array, False), wanted).argmax)(
        jax.ShapeDtypeStruct((rows, length, hidden), jnp.float32)
    )
    assert made.out_avals[0].shape == (rows, length)
    assert vocab < largest(made.jaxpr) <= CHUNK * vocab


def test_choices_are_the_same_few_slots_at_a_time(world, run) -> None:
    batch = make_batch(run.train, [0, 1], 2)
    features = compute_features(run.setup, run.frozen, batch)
    # 100 does not divide the tokens there are.
    again = complete(run.setup.target, run.frozen.target, *features[:2], jnp.asarray(batch.loss_mask), chunk=100)
    np.testing.assert_array_equal(again.argmax, features.argmax)


def test_features_of_other_taps_are_refused(run) -> None:
    other = run.setup._replace(taps=type(run.setup.taps)([2, 1, 4]))
    batch = make_batch(run.train, [0, 1], 2)
    with pytest.raises(WiringError, match="expected .* got"):
        evaluated(run, batch, compute_features(other, run.frozen, batch))


def test_padding_rows_change_nothing(run) -> None:
    padded, doubled = evaluated(run, make_batch(run.train, [1], 2)), evaluated(run, make_batch(run.train, [1, 1], 2))
    np.testing.assert_allclose(padded.losses, doubled.losses, rtol=1e-5)  # the mean over one row, and over it twice
    np.testing.assert_array_equal(2 * np.asarray(padded.counts.total), doubled.counts.total)
    np.testing.assert_array_equal(2 * np.asarray(padded.counts.right), doubled.counts.right)
    different = evaluated(run, make_batch(run.train, [0, 1], 2))
    assert relative(different.losses, padded.losses) > 1e-3


def test_documents_in_one_row_have_the_loss_of_each_alone(run) -> None:
    batch = make_batch(run.train, [0], 2)
    (_, first), (_, second) = list(documents(batch))[:2]
    together = make_batch(run.train, [0], 2)
    for array, fill in zip(together, (0, False, -1), strict=True):
        array[0, second.stop :] = fill
    apart = make_batch(run.train, [0], 2)
    for array, fill in zip(apart, (0, False, -1), strict=True):
        array[1, : second.stop - second.start] = array[0, second]
        array[1, second.stop - second.start :] = fill
        array[0, first.stop :] = fill
    assert (apart.document_ids >= 0).sum() == (together.document_ids >= 0).sum()
    a, b = evaluated(run, together), evaluated(run, apart)
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-5)
    np.testing.assert_array_equal(a.counts.total, b.counts.total)
    np.testing.assert_array_equal(a.counts.right, b.counts.right)


def test_the_cache_gives_rows_back_in_any_combination(run) -> None:
    cache, batch = FeatureCache(), make_batch(run.train, [0, 1], 2)
    features = compute_features(run.setup, run.frozen, batch)
    assert not cache.has([0, 1])
    cache.put([0, 1], features)
    cache.put([2, -1], compute_features(run.setup, run.frozen, make_batch(run.train, [2], 2)))
    assert not cache.has([0, 3])
    got, swapped = cache.get([0, 1]), cache.get([1, 0])
    for a, b, c in zip(*map(jax.tree.leaves, (got, features, swapped)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(c, jnp.flip(jnp.asarray(b), axis=0))
    assert got.taps.tap_set == run.draft.taps and not got.last.normed
    kept, online = evaluated(run, make_batch(run.train, [2], 2), cache.get([2, -1])), None
    online = evaluated(run, make_batch(run.train, [2], 2))
    np.testing.assert_allclose(kept.losses, online.losses, rtol=1e-5)
    np.testing.assert_array_equal(kept.hits, online.hits)

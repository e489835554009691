"""KL, masks and acceptance counts against loops written from their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from eagle3_jax.training.loss import (
    LossOptions,
    Teacher,
    acceptance,
    at_tokens,
    feature_loss,
    hits,
    kl_divergence,
    supervised,
    ttt_loss,
)

STEPS, ROWS, LENGTH, SIZE = 3, 2, 9, 5
masks = arrays(bool, (ROWS, LENGTH))
documents = st.lists(
    st.lists(st.integers(0, 2), min_size=LENGTH, max_size=LENGTH).map(sorted), min_size=ROWS, max_size=ROWS
)


def counts(mask: np.ndarray, document: np.ndarray, slot: int, step: int) -> bool:
    """Whether a slot is supervised at one step, from the definition: its input token exists, in its document."""
    token = slot + 1 + step
    return token < LENGTH and document[slot] >= 0 and document[token] == document[slot] and bool(mask[token])


def logits_of(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_kl_is_that_of_the_definition() -> None:
    p, q = np.random.default_rng(0).dirichlet(np.ones(SIZE), (2, 4))
    expected = (p * np.log(p / q)).sum(-1)
    for offset in (0.0, 50.0):  # logits have no absolute height
        got = kl_divergence(
            jnp.log(jnp.asarray(p, jnp.float32)) + offset, jnp.log(jnp.asarray(q, jnp.float32)) - offset
        )
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
    assert not np.allclose(expected, (q * np.log(q / p)).sum(-1))  # and not the reverse direction


def test_kl_of_certain_targets_is_finite_and_zero_when_equal() -> None:
    certain = jnp.asarray([[0.0, -1e4, -1e4]])
    assert kl_divergence(certain, certain)[0] == 0
    assert np.isfinite(kl_divergence(certain, -certain)[0])


@given(masks, documents)
def test_supervised_slots(mask: np.ndarray, document: list[list[int]]) -> None:
    document = np.asarray(document) - 1  # -1 is padding
    for step in range(STEPS):
        got = np.asarray(supervised(jnp.asarray(mask), jnp.asarray(document), step))
        expected = [[counts(mask[b], document[b], t, step) for t in range(LENGTH - 1)] for b in range(ROWS)]
        np.testing.assert_array_equal(got, expected)


def test_the_loss_is_a_masked_mean_summed_over_decayed_steps() -> None:
    mask = np.random.default_rng(1).random((ROWS, LENGTH)) < 0.6
    document = np.array([[0] * 5 + [1] * 4, [0] * 6 + [-1] * 3])
    logits = [logits_of(s, ROWS, LENGTH - 1, SIZE) for s in range(STEPS)]
    teacher = logits_of(9, ROWS, LENGTH, SIZE)
    masks, options = (jnp.asarray(mask), jnp.asarray(document)), LossOptions(decay=0.5)
    total, losses, *_ = ttt_loss(logits, Teacher(teacher), *masks, options, chunk=5)  # 18 tokens
    for step in range(STEPS):
        terms = [
            # slot t of step s is taught by what the target says at token t+1+s
            float(kl_divergence(teacher[b, t + 1 + step], logits[step][b, t]))
            for b in range(ROWS)
            for t in range(LENGTH - 1)
            if counts(mask[b], document[b], t, step)
        ]
        np.testing.assert_allclose(losses[step], np.mean(terms), rtol=1e-4)
    np.testing.assert_allclose(total, losses[0] + 0.5 * losses[1] + 0.25 * losses[2], rtol=1e-6)


def test_slots_that_do_not_count_get_no_gradient_even_when_not_finite() -> None:
    mask = jnp.zeros((1, LENGTH), bool).at[0, 4].set(True)
    logits = logits_of(0, 1, LENGTH - 1, SIZE).at[0, 0].set(1e30)
    teacher = logits_of(1, 1, LENGTH, SIZE)
    gradient = jax.grad(lambda x: ttt_loss([x], Teacher(teacher), mask, jnp.zeros((1, LENGTH), jnp.int32))[0])(logits)
    assert np.flatnonzero(np.abs(gradient).max((0, 2))).tolist() == [3]  # the slot that reads token 4


def test_nothing_supervised_is_zero_not_nan() -> None:
    nothing = jnp.zeros((1, LENGTH), bool)
    documents = jnp.zeros((1, LENGTH), jnp.int32)
    logits, teacher = logits_of(0, 1, LENGTH - 1, SIZE), Teacher(logits_of(1, 1, LENGTH, SIZE))
    total, gradient = jax.value_and_grad(lambda x: ttt_loss([x], teacher, nothing, documents)[0])(logits)
    assert total == 0 and not gradient.any()
    empty = acceptance(jnp.ones((2, 1, LENGTH - 1), bool), nothing, documents)
    assert empty.total.tolist() == [0, 0]


def test_feature_loss_is_a_relative_masked_mean() -> None:
    mask = np.random.default_rng(1).random((ROWS, LENGTH)) < 0.6
    document = np.array([[0] * 5 + [1] * 4, [0] * 6 + [-1] * 3])
    outputs = [logits_of(s, ROWS, LENGTH - 1, SIZE) for s in range(2)]
    last = logits_of(9, ROWS, LENGTH, SIZE)
    expected = 0.0
    for step, y in enumerate(np.asarray(y) for y in outputs):
        terms = []
        for b, t in np.ndindex(ROWS, LENGTH - 1):
            if counts(mask[b], document[b], t, step):
                h = np.asarray(last[b, t + 1 + step])
                terms.append(((y[b, t] - h) ** 2).sum() / (h**2).sum())
        expected += np.mean(terms)
    got = feature_loss(outputs, last, jnp.asarray(mask), jnp.asarray(document))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_a_hit_is_the_targets_own_choice_as_a_target_id() -> None:
    d2t = jnp.asarray([10, 20, 30])
    choice = jnp.asarray([[20, 30, 99, 10]])  # 99 is outside the draft vocabulary
    top = jnp.asarray([[2, 0, 0]])  # of slots 0 to 2 at both steps; target ids 30, 10, 10
    # step 0: slot t against the choice at token t+1; step 1: at t+2, past the end nothing can be right
    assert hits(at_tokens([top, top]), choice, d2t)[:, 0].tolist() == [[True, False, True], [False, True, False]]


@given(arrays(bool, (STEPS, ROWS, LENGTH - 1)), masks, documents)
def test_acceptance_counts(right: np.ndarray, mask: np.ndarray, document: list[list[int]]) -> None:
    document = np.asarray(document) - 1
    got = acceptance(jnp.asarray(right), jnp.asarray(mask), jnp.asarray(document))
    for step in range(STEPS):
        full = total = before = 0
        for b, t in np.ndindex(ROWS, LENGTH - 1):
            if all(counts(mask[b], document[b], t, s) for s in range(step + 1)):
                total += 1
                before += right[:step, b, t].all()
                full += right[: step + 1, b, t].all()
        assert (got.right[step], got.total[step], got.before[step]) == (full, total, before)


def test_a_packed_row_counts_what_its_documents_count_alone() -> None:
    rng = np.random.default_rng(3)
    lengths, row = [6, 6, 6], 18
    document = np.repeat(np.arange(3), lengths)[None]
    mask = rng.random((1, row)) < 0.7
    logits = [logits_of(s, 1, row - 1, SIZE) for s in range(STEPS)]
    teacher, d2t = logits_of(9, 1, row, SIZE), jnp.arange(SIZE)
    choice = jnp.argmax(teacher, axis=-1)
    _, losses, choices, preferred = ttt_loss(logits, Teacher(teacher), jnp.asarray(mask), jnp.asarray(document))
    np.testing.assert_array_equal(preferred[mask], choice[mask])
    together = acceptance(hits(choices, choice, d2t), jnp.asarray(mask), jnp.asarray(document))
    part_acceptance, part_loss = jax.jit(acceptance), jax.jit(ttt_loss)
    sums, kl = np.zeros((3, STEPS), int), np.zeros((2, STEPS))
    for begin, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        part = slice(begin, begin + length)
        alone = [step[:, begin : begin + length - 1] for step in logits]
        zeros = jnp.zeros((1, length), jnp.int32)
        _, part_losses, choices, _ = part_loss(alone, Teacher(teacher[:, part]), jnp.asarray(mask[:, part]), zeros)
        sums += np.asarray(part_acceptance(hits(choices, choice[:, part], d2t), jnp.asarray(mask[:, part]), zeros))
        weights = np.array([supervised(jnp.asarray(mask[:, part]), zeros, s).sum() for s in range(STEPS)])
        kl += np.stack([np.asarray(part_losses) * weights, weights])
    np.testing.assert_array_equal(np.asarray(together), sums)
    np.testing.assert_allclose(losses, kl[0] / kl[1], rtol=1e-4)

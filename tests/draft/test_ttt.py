"""`ttt_forward`: alignment of tokens and features, documents in one row, positions, and slots without meaning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.draft.ttt import document_positions, shift, slot_valid, ttt_forward
from tests.tiny import ids_of, random_draft, relative

LENGTH, STEPS = 14, 3
DOCUMENTS = np.array([[0] * 6 + [1] * 5 + [-1] * 3])


@pytest.fixture(scope="module")
def features() -> e3.Taps:
    """Random features of one row; any will do."""
    rng = np.random.default_rng(5)
    return e3.Taps(
        [jnp.asarray(rng.standard_normal((1, LENGTH, 64)), jnp.float32) for _ in range(3)], e3.TapSet([2, 4, 6])
    )


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return ids_of(6, 1, LENGTH)


@pytest.fixture(scope="module")
def packed(tiny_draft, features, ids) -> list[np.ndarray]:
    return [np.asarray(a) for a in tiny_draft.ttt_forward(features, ids, STEPS, document_ids=DOCUMENTS)]


def changed_slots(a: list, b: list) -> list[list[int]]:
    """Slots whose logits differ, of each step."""
    return [
        np.flatnonzero(np.abs(np.asarray(x) - np.asarray(y)).max((0, 2)) > 1e-4).tolist()
        for x, y in zip(a, b, strict=True)
    ]


def test_shapes_and_dtype(packed) -> None:
    assert [a.shape for a in packed] == [(1, LENGTH - 1, 128)] * STEPS
    assert all(a.dtype == np.float32 for a in packed)


def test_inputs_that_do_not_go_together_are_refused_in_one_line(tiny_draft, features, ids, untyped) -> None:
    fused = np.zeros((1, LENGTH, 192), np.float32)
    for given, changes, message in [
        (fused, {}, "does not say what taps it holds"),
        (list(features.arrays), {}, "does not say what taps"),
        (features, {"ids": ids[:, :-1]}, r"\[1, 14, 64\] for token ids of shape \[1, 13\]"),
        (features.map(lambda a: a[..., :32]), {}, r"\[1, 14, 32\]"),
        (features.map(lambda a: a[:, :1]), {"ids": ids[:, :1]}, "2 or more tokens"),
        (features, {"ids": ids * 1.0}, "token ids are float64"),
        (features, {"steps": 0}, "steps 0"),
        (features, {"document_ids": DOCUMENTS[:, :-1]}, r"document_ids are int64 \[1, 13\]"),
        (features, {"positions": np.arange(LENGTH - 1)[None]}, "positions are"),
        (features, {"positions": np.arange(LENGTH)[None] * 0.5}, "positions are float64"),
    ]:
        with pytest.raises((e3.UserError, e3.WiringError), match=message) as caught:
            tiny_draft.ttt_forward(given, **{"ids": ids, "steps": 1} | changes)
        assert "\n" not in str(caught.value)


def test_slots_without_meaning_are_finite(packed) -> None:
    assert all(np.isfinite(a).all() for a in packed)


def test_a_packed_row_equals_its_documents_alone(tiny_draft, features, ids, packed) -> None:
    for document in (0, 1):
        inside = np.flatnonzero(DOCUMENTS[0] == document)
        # The other document replaced by other tokens and features: nothing may leak.
        outside = jnp.asarray(np.not_equal(DOCUMENTS, document))
        other = features.map(lambda a, o=outside: jnp.where(o[..., None], -a, a))
        other_ids = np.where(outside, 7, ids)
        alone = tiny_draft.ttt_forward(other, other_ids, STEPS, document_ids=DOCUMENTS)
        begin = inside[0]
        first = features.map(lambda a, b=begin: jnp.roll(a, -b, axis=1))  # the same document at the row's start
        moved = tiny_draft.ttt_forward(
            first, np.roll(ids, -begin, 1), STEPS, document_ids=np.where(np.arange(LENGTH) < len(inside), 0, -1)[None]
        )
        for step in range(STEPS):
            valid = inside[: len(inside) - 1 - step]
            assert relative(alone[step][0, valid], packed[step][0, valid]) < 1e-5
            assert relative(moved[step][0, valid - begin], packed[step][0, valid]) < 1e-5


def test_an_offset_common_to_a_document_changes_nothing(tiny_draft, features, ids, packed) -> None:
    default = np.asarray(document_positions(jnp.asarray(DOCUMENTS)))
    offset = default + np.where(DOCUMENTS == 0, 17, 40)
    moved = tiny_draft.ttt_forward(features, ids, STEPS, positions=offset, document_ids=DOCUMENTS)
    for step in range(STEPS):
        valid = np.flatnonzero(np.asarray(slot_valid(jnp.asarray(DOCUMENTS), step))[0])
        assert relative(moved[step][0, valid], packed[step][0, valid]) < 1e-4
    stretched = tiny_draft.ttt_forward(features, ids, STEPS, positions=2 * default, document_ids=DOCUMENTS)
    assert relative(stretched[0], packed[0]) > 1e-3  # positions do matter


def test_one_document_is_the_default(tiny_draft, features, ids) -> None:
    default = tiny_draft.ttt_forward(features, ids, STEPS)
    zeros = tiny_draft.ttt_forward(
        features, ids, STEPS, positions=np.arange(LENGTH)[None], document_ids=np.zeros((1, LENGTH), int)
    )
    for a, b in zip(default, zeros, strict=True):
        np.testing.assert_array_equal(a, b)


def test_slot_t_of_step_s_reads_tokens_up_to_t_plus_1_plus_s(tiny_draft, features, ids) -> None:
    before = tiny_draft.ttt_forward(features, ids, STEPS)
    token = 8
    other = ids.copy()
    other[0, token] = (other[0, token] + 1) % 512
    changed = changed_slots(before, tiny_draft.ttt_forward(features, other, STEPS))
    assert [slots[0] for slots in changed] == [token - 1 - s for s in range(STEPS)]
    assert changed[0] == list(range(token - 1, LENGTH - 1))


def test_slot_t_reads_features_up_to_t(tiny_draft, features, ids) -> None:
    before = tiny_draft.ttt_forward(features, ids, STEPS)
    moved = features.map(lambda a: a.at[0, 8].add(1.0))
    changed = changed_slots(before, tiny_draft.ttt_forward(moved, ids, STEPS))
    assert [slots[0] for slots in changed] == [8] * STEPS


def test_the_first_token_is_never_read(tiny_draft, features, ids) -> None:
    other = ids.copy()
    other[0, 0] = (other[0, 0] + 1) % 512
    assert (
        changed_slots(tiny_draft.ttt_forward(features, ids, STEPS), tiny_draft.ttt_forward(features, other, STEPS))
        == [[]] * 3
    )


def test_features_must_be_those_the_draft_reads(tiny_draft, features, ids) -> None:
    swapped = e3.Taps(features.arrays, e3.TapSet([4, 2, 6]))
    with pytest.raises(e3.WiringError, match="expected .*block 2 input, block 4 input.* got .*block 4 input, block 2"):
        tiny_draft.ttt_forward(swapped, ids, 1)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_every_norm_flag_changes_the_numbers(tiny_target, tiny_draft, features, ids, flag: str) -> None:
    plain = tiny_draft.ttt_forward(features, ids, 2)
    flagged = random_draft(tiny_target, **{flag: True}).ttt_forward(features, ids, 2)
    same = flag == "norm_output"  # which only concerns what is fed back
    assert (relative(flagged[0], plain[0]) < 1e-6) == same
    assert relative(flagged[1], plain[1]) > 1e-3


def test_shift_and_validity() -> None:
    x = jnp.asarray([[1, 2, 3]])
    assert [shift(x, by, 9).tolist() for by in (0, 1, 3, 5)] == [[[1, 2, 3]], [[2, 3, 9]], [[9, 9, 9]], [[9, 9, 9]]]
    documents = jnp.asarray([[0, 0, 0, 1, 1, -1, -1]])
    assert slot_valid(documents, 0)[0].tolist() == [True, True, False, True, False, False]
    assert slot_valid(documents, 1)[0].tolist() == [True, False, False, False, False, False]
    assert document_positions(documents)[0].tolist() == [0, 1, 2, 0, 1, 0, 1]


def test_queries_in_blocks_are_the_row_at_once(tiny_draft, features, ids) -> None:
    documents = jnp.asarray(DOCUMENTS)
    positions = document_positions(documents)

    def outcome(block: int, remat: bool):
        def loss(params):
            model = tiny_draft.graph.merge(params)
            logits = ttt_forward(model, features, jnp.asarray(ids), positions, documents, STEPS, remat, block)
            return sum(jnp.sum(jnp.sin(step)) for step in logits), logits

        return jax.jit(jax.grad(loss, has_aux=True))(tiny_draft.params)

    expected = outcome(LENGTH, False)
    for got, whole in zip(jax.tree.leaves(outcome(4, True)), jax.tree.leaves(expected), strict=True):
        assert relative(got, whole) < 1e-5

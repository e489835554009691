"""Packing keeps every supervised token once, every document in one piece, and counts what it leaves out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data.packing import pack
from eagle3_jax.errors import UserError


def document(length: int, mask: list[int], first_id: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(first_id, first_id + length, dtype=np.int32), np.array(mask, dtype=bool)


@st.composite
def documents(draw: st.DrawFn) -> list[tuple[np.ndarray, np.ndarray]]:
    """Documents whose ids are all distinct, across documents too; at least one supervised token at a start."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12))
    masks[draw(st.integers(0, len(masks) - 1))][0] = 1
    starts = np.cumsum([1] + [len(mask) for mask in masks])
    return [document(len(mask), mask, int(start)) for mask, start in zip(masks, starts, strict=False)]


@given(documents(), st.integers(2, 14))
def test_rows_hold_the_cut_documents_and_nothing_else(given_documents: list, length: int) -> None:
    packed = pack(given_documents, length)
    expected = {
        tuple(ids[:length]): tuple(mask[:length]) for ids, mask in given_documents if mask[:length].any()
    }  # ids are distinct, so a document is found by its ids
    found = {}
    for ids, mask, numbers in zip(packed.input_ids, packed.loss_mask, packed.document_ids, strict=True):
        used = int((numbers >= 0).sum())
        assert used > 0 and (numbers[used:] == -1).all() and not mask[used:].any() and not ids[used:].any()
        assert (np.diff(numbers[:used]) >= 0).all()  # contiguous
        assert np.unique(numbers[:used]).tolist() == list(range(numbers[used - 1] + 1))
        for number in range(numbers[used - 1] + 1):
            key = tuple(ids[numbers == number])
            assert key not in found
            found[key] = tuple(mask[numbers == number])
    assert found == expected

    report = packed.report
    supervised = sum(int(mask.sum()) for _, mask in given_documents)
    assert report.documents == len(given_documents)
    assert report.dropped_documents == len(given_documents) - len(expected)
    assert report.cut_documents == sum(len(ids) > length for ids, _ in given_documents)
    assert report.supervised_tokens == packed.loss_mask.sum() == supervised - report.lost_supervised_tokens
    assert report.rows == len(packed.input_ids)
    assert report.fill_rate == pytest.approx(sum(map(len, expected)) / packed.input_ids.size)


@given(documents(), st.integers(2, 14))
def test_packing_is_deterministic_and_leaves_no_needless_row(given_documents: list, length: int) -> None:
    packed, again = pack(given_documents, length), pack(given_documents, length)
    np.testing.assert_array_equal(packed.input_ids, again.input_ids)
    used = np.sort((packed.document_ids >= 0).sum(axis=1))
    assert len(used) < 2 or used[0] + used[1] > length  # first fit never leaves two rows that fit into one


def test_longest_first_and_types() -> None:
    packed = pack([document(2, [0, 1], 10), document(4, [0, 0, 1, 1], 20), document(3, [1, 1, 1], 30)], 5)
    assert packed.input_ids.tolist() == [[20, 21, 22, 23, 0], [30, 31, 32, 10, 11]]
    assert packed.document_ids.tolist() == [[0, 0, 0, 0, -1], [0, 0, 0, 1, 1]]
    assert packed.loss_mask.tolist() == [[False, False, True, True, False], [True, True, True, False, True]]
    assert (packed.input_ids.dtype, packed.loss_mask.dtype, packed.document_ids.dtype) == (np.int32, bool, np.int32)


def test_a_long_prompt_is_dropped_and_counted_not_trained_on_as_nan() -> None:
    prompt, mixed = document(40, [0] * 39 + [1]), document(3, [0, 1, 1])
    report = pack([prompt, mixed], 16).report
    assert (report.dropped_documents, report.cut_documents) == (1, 1)
    assert (report.supervised_tokens, report.lost_supervised_tokens) == (2, 1)
    with pytest.raises(UserError, match="nothing to train on: none of 1 documents .* first 16"):
        pack([prompt], 16)


def test_no_documents_and_useless_lengths_are_errors() -> None:
    with pytest.raises(UserError, match="none of 0 documents"):
        pack([], 16)
    with pytest.raises(UserError, match="length 1 is too short"):
        pack([document(3, [0, 1, 1])], 1)


def test_overlong_documents_are_left_out_on_request() -> None:
    documents = [(np.arange(n, dtype=np.int32), np.arange(n) > 0) for n in (5, 9, 3)] + [
        (np.arange(2, dtype=np.int32), np.zeros(2, bool))
    ]
    cut, dropped = pack(documents, 8).report, pack(documents, 8, drop_overlong=True).report
    assert (cut.cut_documents, cut.overlong_documents, cut.dropped_documents) == (1, 0, 1)
    assert (dropped.cut_documents, dropped.overlong_documents, dropped.dropped_documents) == (0, 1, 2)
    assert cut.unsupervised_documents == dropped.unsupervised_documents == 1
    assert dropped.supervised_tokens == 4 + 2
    with pytest.raises(UserError, match="documents longer than 8 tokens are left out"):
        pack(documents[1:2], 8, drop_overlong=True)

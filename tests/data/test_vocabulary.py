"""The draft vocabulary: what is chosen, the maps back and forth, and that broken maps are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data.vocabulary import check_map, coverage, draft_vocabulary, t2d, to_absolute, to_offsets
from eagle3_jax.errors import UserError

DOCUMENTS = [
    (np.array([9, 5, 5, 7], dtype=np.int32), np.array([False, True, True, True])),
    (np.array([9, 9, 3, 7, 5], dtype=np.int32), np.array([False, False, True, True, False])),
]  # supervised: 5 twice, 7 twice, 3 once; 9 never


def absolute_maps() -> st.SearchStrategy[tuple[np.ndarray, int]]:
    """(distinct target ids in any order, target vocabulary size)"""
    return st.integers(1, 60).flatmap(
        lambda size: st.tuples(
            st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True).map(np.array), st.just(size)
        )
    )


@pytest.mark.parametrize(
    ("size", "always", "expected"),
    [
        (1, (), [5]),  # a tie with 7 goes to the smaller id
        (2, (), [5, 7]),
        (3, (), [3, 5, 7]),
        (5, (), [0, 1, 3, 5, 7]),  # the smallest unused ids, not the unsupervised 9
        (2, (9,), [5, 9]),
        (4, (9, 3, 3), [3, 5, 7, 9]),
        (12, (), list(range(12))),
    ],
)
def test_the_most_frequent_supervised_tokens_are_chosen(size: int, always: tuple, expected: list[int]) -> None:
    chosen = draft_vocabulary(DOCUMENTS, size, 12, always)
    assert chosen.dtype == np.int32 and chosen.tolist() == expected


def test_an_integer_mask_selects_like_a_boolean_one() -> None:
    integer = [(ids, mask.astype(np.int32)) for ids, mask in DOCUMENTS]
    assert draft_vocabulary(integer, 3, 12).tolist() == [3, 5, 7]
    assert coverage(integer, np.array([5])) == coverage(DOCUMENTS, np.array([5])) == 2 / 5


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [
        (13, (), r"size 13 is outside 1..12"),
        (0, (), r"size 0 is outside 1..12"),
        (2, (12,), r"end tokens \[12\] are not all in 0..11"),
        (2, (1, 2, 3), "cannot hold the 3 end tokens"),
    ],
)
def test_impossible_vocabularies_are_refused(size: int, always: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        draft_vocabulary(DOCUMENTS, size, 12, always)


def test_nothing_supervised_is_refused() -> None:
    nothing = [(ids, np.zeros_like(mask)) for ids, mask in DOCUMENTS]
    with pytest.raises(UserError, match="no supervised token"):
        draft_vocabulary(nothing, 4, 12)
    with pytest.raises(UserError, match="no supervised token"):
        coverage(nothing, np.array([5]))


@given(st.lists(st.integers(0, 19), min_size=1, max_size=40), st.integers(1, 20), st.sets(st.integers(0, 19)))
def test_a_chosen_vocabulary_is_a_valid_map(tokens: list[int], size: int, always: set[int]) -> None:
    ids = np.array(tokens, dtype=np.int32)
    always = set(sorted(always)[:size])
    chosen = draft_vocabulary([(ids, np.ones(len(ids), dtype=bool))], size, 20, always)
    assert len(chosen) == size and (np.diff(chosen) > 0).all() and always <= set(chosen.tolist())
    check_map(to_offsets(chosen), t2d(chosen, 20), 20)
    counts = np.bincount(ids, minlength=20)
    outside = np.setdiff1d(np.arange(20), chosen)
    free = np.setdiff1d(chosen, list(always))
    assert not len(outside) or not len(free) or counts[outside].max() <= counts[free].min()


@given(absolute_maps())
def test_maps_round_trip(case: tuple[np.ndarray, int]) -> None:
    absolute, vocab_size = case
    offsets, member = to_offsets(absolute), t2d(absolute, vocab_size)
    assert offsets.dtype == np.int64 and member.dtype == bool and member.shape == (vocab_size,)
    assert to_absolute(offsets).dtype == np.int32
    np.testing.assert_array_equal(to_absolute(offsets), absolute)
    np.testing.assert_array_equal(np.flatnonzero(member), np.sort(absolute))
    check_map(offsets, member, vocab_size)


@given(absolute_maps().filter(lambda case: len(case[0]) < case[1]), st.data())
def test_any_disagreement_with_t2d_is_refused(case: tuple[np.ndarray, int], data: st.DataObject) -> None:
    absolute, vocab_size = case
    member = t2d(absolute, vocab_size)
    member[data.draw(st.integers(0, vocab_size - 1))] ^= True
    with pytest.raises(UserError, match="d2t and t2d disagree on 1 target ids"):
        check_map(to_offsets(absolute), member, vocab_size)


def test_zero_offsets_are_the_identity() -> None:
    check_map(np.zeros(128, dtype=np.int64), None, 512)
    check_map(np.zeros(128, dtype=np.int64), np.arange(512) < 128, 512)


@pytest.mark.parametrize(
    ("values", "vocab_size"),
    [
        (np.arange(128), 512),  # decodes draft id i as 2i
        (np.arange(128), 128),  # out of range
        (np.sort(np.random.default_rng(0).permutation(512)[:128]), 512),
        (np.random.default_rng(1).permutation(512)[:128], 512),  # in order of frequency
    ],
)
def test_absolute_ids_in_place_of_offsets_are_explained(values: np.ndarray, vocab_size: int) -> None:
    for member in (None, t2d(values, vocab_size)):
        with pytest.raises(UserError, match=r"look like absolute target ids.*subtract arange"):
            check_map(values, member, vocab_size)


def test_absolute_ids_that_are_plausible_offsets_need_t2d() -> None:
    values = np.arange(0, 1200, 2) + np.arange(600) % 2  # as offsets: in range and distinct, so possible
    check_map(values, None, 2000)
    with pytest.raises(UserError, match=r"disagree.*look like absolute target ids"):
        check_map(values, t2d(values, 2000), 2000)


def test_a_scattered_map_is_accepted() -> None:
    every_fourth = np.arange(0, 512, 4)
    check_map(to_offsets(every_fourth), None, 512)


def test_t2d_settles_an_unusual_map() -> None:
    every_other = np.arange(0, 64, 2)  # offsets equal arange
    check_map(to_offsets(every_other), t2d(every_other, 64), 64)
    with pytest.raises(UserError, match="or supply t2d"):
        check_map(to_offsets(every_other), None, 64)


@pytest.mark.parametrize(
    ("offsets", "member", "message"),
    [
        ([0, 0, -3], None, r"draft id 2 to target id -1, outside 0..9"),
        ([0, 0, 8], None, r"draft id 2 to target id 10, outside 0..9"),
        ([1, 0, 0], None, "2 draft ids to the same target id 1"),
        ([0] * 11, None, "expected 1 to 10 integers"),
        ([], None, "expected 1 to 10 integers"),
        ([0.0, 1.0], None, "d2t is float64"),
        ([[0, 0]], None, "d2t is int64"),
        ([0, 0], np.ones(9, dtype=bool), r"t2d has shape \[9\]; expected \[10\]"),
    ],
)
def test_broken_maps_are_refused(offsets: list, member: np.ndarray | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_map(np.array(offsets), member, 10)


def test_coverage_counts_tokens_not_types() -> None:
    assert coverage(DOCUMENTS, np.array([5, 7])) == 4 / 5
    assert coverage(DOCUMENTS, np.array([9])) == 0

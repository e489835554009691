"""The walk: by hand, and against one written from what a server does."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from eagle3_jax.training.loss import Acceptance
from eagle3_jax.training.metrics import AcceptanceMeter, walk

STEPS, ROWS, LENGTH = 3, 2, 12


def served(hits: np.ndarray, mask: np.ndarray, documents: np.ndarray) -> list[list[int]]:
    """The walk from the definition of a round, token by token: `pending` is the newest token that is known."""
    answers = []
    for row in range(len(mask)):
        for begin in range(1, LENGTH):
            for end in range(begin + 1, LENGTH + 1):
                if not is_answer(mask[row], documents[row], begin, end):
                    continue
                rounds, pending = [], begin
                while pending + 1 < end:
                    accepted = 0
                    while accepted < STEPS and pending + accepted < end and hits[accepted, row, pending - 1]:
                        accepted += 1
                    rounds.append(accepted)
                    pending += accepted + 1
                answers.append(rounds)
    return answers


def is_answer(mask: np.ndarray, documents: np.ndarray, begin: int, end: int) -> bool:
    """Whether begin..end-1 are supervised tokens of one document, with one before them, and cannot be extended."""
    inside = mask[begin:end].all() and len(set(documents[begin:end])) == 1 and documents[begin] >= 0
    longer = end < LENGTH and mask[end] and documents[end] == documents[begin]
    return bool(inside and documents[begin - 1] == documents[begin] and not mask[begin - 1] and not longer)


@given(
    arrays(bool, (STEPS, ROWS, LENGTH - 1)),
    arrays(bool, (ROWS, LENGTH)),
    st.lists(st.lists(st.integers(-1, 2), min_size=LENGTH, max_size=LENGTH).map(sorted), min_size=ROWS, max_size=ROWS),
)
def test_the_walk_is_what_a_server_does(hits, mask, documents) -> None:
    documents = np.asarray(documents)
    assert walk(hits, mask, documents) == served(hits, mask, documents)


def one_row(hits: list[list[int]], mask: list[int], documents: list[int]) -> list[list[int]]:
    return walk(np.array(hits, bool)[:, None], np.array([mask], bool), np.array([documents]))


def test_by_hand() -> None:
    # Tokens 2..7 are the answer, so the first round is at slot 1. It accepts 2 (step 2 misses), the next is at slot
    # 4, where step 0 misses, the next at slot 5: it predicts token 7 and then token 8, one past the answer, no more.
    first = [0, 1, 0, 0, 0, 1, 1]
    second = [0, 1, 0, 0, 1, 1, 1]
    third = [0, 0, 0, 0, 1, 1, 1]
    assert one_row([first, second, third], [0, 0, 1, 1, 1, 1, 1, 1], [0] * 8) == [[2, 0, 2]]


def test_an_answer_of_one_token_has_no_round() -> None:
    assert one_row([[1] * 4], [0, 0, 1, 0, 0], [0] * 5) == [[]]


def test_several_answers_in_a_row_start_anew() -> None:
    mask = [0, 1, 1, 1, 0, 1, 1, 0, 1, 1]
    documents = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert one_row([[1, 0, 1, 1, 0, 1, 1, 1, 1]], mask, documents) == [[1], [0], [1]]


def test_an_answer_without_a_slot_before_it_is_left_out() -> None:
    # At the start of the row and at the start of the second document no slot reads the first token.
    assert one_row([[1] * 7], [1, 1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]) == []


def test_the_meter_adds_up() -> None:
    mask, documents = np.array([[0, 1, 1, 1, 1, 1]], bool), np.zeros((1, 6), int)
    meter = AcceptanceMeter(2)
    batches = {
        "both right": ([[1, 0, 0, 0, 1], [1, 0, 0, 0, 1]], [[5, 3], [8, 6], [8, 4]]),  # rounds: 2, 0
        "none right": ([[0] * 5, [0] * 5], [[1, 0], [2, 2], [2, 1]]),  # rounds: 0, 0, 0, 0
    }
    for hits, counts in batches.values():
        meter.add(Acceptance(*np.array(counts)), np.array(hits, bool)[:, None], mask, documents, covered=4)
    assert (meter.accepted, meter.rounds) == (2, 6)
    assert meter.summary() == {
        "simulated_tau": 1 + 2 / 6,
        "slot_tau": 1 + 6 / 10 + 3 / 8,
        "full_acceptance": [0.6, 0.375],
        "conditional_acceptance": [0.6, 0.6],
        "accuracy": 0.6,
        "accuracy_in_vocabulary": 6 / 8,
    }


def test_a_meter_without_rounds() -> None:
    assert AcceptanceMeter(2).summary() == {
        "simulated_tau": 1.0,
        "slot_tau": 1.0,
        "full_acceptance": [0.0, 0.0],
        "conditional_acceptance": [0.0, 0.0],
        "accuracy": 0.0,
        "accuracy_in_vocabulary": 0.0,
    }

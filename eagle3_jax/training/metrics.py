"""Acceptance as it would be served: the walk over held-out answers (api.md, "simulated tau").

Served, a round starts at some slot, accepts the draft tokens in a row that equal the target's choice, and the next
round starts accepted + 1 slots later. The walk does the same over the hits of the training graph.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eagle3_jax.speculate.acceptance import tau


class Answer(NamedTuple):
    """The rounds of one answer: accepted counts, and the slots (places in the row) that rounds begin at.

    row, document: where it is in the batch. tokens: [begin, end) of the answer in the row.
    """

    row: int
    document: int
    tokens: tuple[int, int]
    slots: list[int]
    accepted: list[int]


def walk_answers(hits: np.ndarray, loss_mask: np.ndarray, document_ids: np.ndarray) -> list[Answer]:
    """The rounds of every answer, in row order.

    hits: bool [S, B, T-1], step s right at slot t. loss_mask: bool [B, T]; document_ids: int [B, T]. An answer is a run
    of supervised tokens p..e of one document; its first round starts at slot p-1 (the slot that reads token p), and
    rounds go on while the token that slot t predicts, t+2, is in the answer. Beyond the end nothing is known: a round
    there accepts at most up to the token after the answer.
    """
    answers = []
    for row in range(loss_mask.shape[0]):
        for begin, end in _answers(loss_mask[row], document_ids[row]):
            slots, accepted, slot = [], [], begin - 1
            while slot + 2 < end:
                deepest = min(hits.shape[0], end - 1 - slot)
                right = hits[:deepest, row, slot]
                count = deepest if right.all() else int(np.argmin(right))
                slots.append(slot)
                accepted.append(count)
                slot += count + 1
            answers.append(Answer(row, int(document_ids[row, begin]), (begin, end), slots, accepted))
    return answers


def walk(hits: np.ndarray, loss_mask: np.ndarray, document_ids: np.ndarray) -> list[list[int]]:
    """Accepted counts round by round, one list an answer, in row order: see `walk_answers`."""
    return [answer.accepted for answer in walk_answers(hits, loss_mask, document_ids)]


def _answers(loss_mask: np.ndarray, document_ids: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each run of supervised tokens within one document, those at a document's start excluded."""
    runs, begin = [], None
    for t in range(len(loss_mask) + 1):
        inside = t < len(loss_mask) and loss_mask[t] and document_ids[t] >= 0
        same = begin is not None and t < len(loss_mask) and document_ids[t] == document_ids[begin]
        if begin is not None and not (inside and same):
            if begin > 0 and document_ids[begin - 1] == document_ids[begin]:
                runs.append((begin, t))
            begin = None
        if inside and begin is None:
            begin = t
    return runs


@dataclass
class AcceptanceMeter:
    """Adds up counts over batches. tau: simulated, by the walk; slot_tau: the mean over all slots."""

    steps: int
    accepted: int = 0
    rounds: int = 0
    covered: int | None = 0
    right: np.ndarray = field(init=False)
    total: np.ndarray = field(init=False)
    before: np.ndarray = field(init=False)

    def __post_init__(self):
        self.right, self.total, self.before = (np.zeros(self.steps, np.int64) for _ in range(3))

    def add(
        self, counts, hits: np.ndarray, loss_mask: np.ndarray, document_ids: np.ndarray, covered: int | None
    ) -> list[Answer]:
        """Adds a batch and returns its answers. counts: `loss.Acceptance`; covered: supervised slots whose target
        choice is in the draft vocabulary, None if not known; the other arrays as for `walk_answers`."""
        answers = walk_answers(hits, loss_mask, document_ids)
        self.accepted += sum(sum(answer.accepted) for answer in answers)
        self.rounds += sum(len(answer.accepted) for answer in answers)
        self.right += np.asarray(counts.right)
        self.total += np.asarray(counts.total)
        self.before += np.asarray(counts.before)
        self.covered = None if covered is None or self.covered is None else self.covered + covered
        return answers

    def add_batch(self, outcome, batch) -> list[Answer]:
        """`add` of a `step.Outcome` and the `step.Batch` it is of."""
        covered = None if outcome.covered is None else int(outcome.covered)
        return self.add(outcome.counts, np.asarray(outcome.hits), batch.loss_mask, batch.document_ids, covered)

    def summary(self) -> dict[str, float | list[float]]:
        """accuracy: of the first draft token, a choice outside the draft vocabulary being a miss; the other one, if it
        can be known, is over the choices within it."""
        full = self.right / np.maximum(self.total, 1)
        within = None if self.covered is None else round(float(self.right[0] / max(self.covered, 1)), 5)
        return {
            "accuracy": round(float(full[0]), 5),
            **({} if within is None else {"accuracy_in_vocabulary": within}),
            "simulated_tau": tau(self.accepted, self.rounds),
            "slot_tau": 1.0 + float(full.sum()),
            "full_acceptance": full.round(5).tolist(),
            "conditional_acceptance": (self.right / np.maximum(self.before, 1)).round(5).tolist(),
        }


class Breakdown:
    """Simulated tau by some property of the rounds: the source of their text, the place in their document."""

    def __init__(self):
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, key: str, accepted: int) -> None:
        """One round."""
        counts = self._counts[key]
        counts[0] += accepted
        counts[1] += 1

    def summary(self) -> dict[str, dict[str, float | int]]:
        return {
            key: {"simulated_tau": round(tau(accepted, rounds), 5), "rounds": rounds}
            for key, (accepted, rounds) in sorted(self._counts.items(), key=lambda item: _number_first(item[0]))
        }


BUCKETS = (64, 256, 1024, 4096)  # tokens of a document before a round


def bucket(position: int) -> str:
    """The bucket of a place in a document, as `64-255`."""
    edges = (0, *BUCKETS)
    low = max(edge for edge in edges if edge <= position)
    higher = [edge for edge in edges if edge > position]
    return f"{low}-{higher[0] - 1}" if higher else f"{low}+"


def _number_first(key: str) -> tuple[int, str]:
    number = key.split("-")[0].rstrip("+")
    return (int(number) if number.isdigit() else 0, key)

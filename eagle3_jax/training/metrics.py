"""Acceptance as it would be served: the walk over held-out answers (api.md, "simulated tau").

Served, a round starts at some slot, accepts the draft tokens in a row that equal the target's choice, and the next
round starts accepted + 1 slots later. The walk does the same over the hits of the training graph.
"""

from dataclasses import dataclass, field

import numpy as np


def walk(hits: np.ndarray, loss_mask: np.ndarray, document_ids: np.ndarray) -> list[list[int]]:
    """Accepted counts round by round, one list an answer, in row order.

    hits: bool [S, B, T-1], step s right at slot t. loss_mask: bool [B, T]; document_ids: int [B, T]. An answer is a run
    of supervised tokens p..e of one document; its first round starts at slot p-1 (the slot that reads token p), and
    rounds go on while the token that slot t predicts, t+2, is in the answer. Beyond the end nothing is known: a round
    there accepts at most up to the token after the answer.
    """
    answers = []
    for row in range(loss_mask.shape[0]):
        for begin, end in _answers(loss_mask[row], document_ids[row]):
            accepted, slot = [], begin - 1
            while slot + 2 < end:
                deepest = min(hits.shape[0], end - 1 - slot)
                right = hits[:deepest, row, slot]
                count = deepest if right.all() else int(np.argmin(right))
                accepted.append(count)
                slot += count + 1
            answers.append(accepted)
    return answers


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
    right: np.ndarray = field(init=False)
    total: np.ndarray = field(init=False)
    before: np.ndarray = field(init=False)

    def __post_init__(self):
        self.right, self.total, self.before = (np.zeros(self.steps, np.int64) for _ in range(3))

    def add(self, counts, hits: np.ndarray, loss_mask: np.ndarray, document_ids: np.ndarray) -> None:
        """counts: `loss.Acceptance` of the batch; the other arrays as for `walk`."""
        for answer in walk(hits, loss_mask, document_ids):
            self.accepted += sum(answer)
            self.rounds += len(answer)
        self.right += np.asarray(counts.right)
        self.total += np.asarray(counts.total)
        self.before += np.asarray(counts.before)

    def summary(self) -> dict[str, float | list[float]]:
        full = self.right / np.maximum(self.total, 1)
        return {
            "simulated_tau": 1.0 + self.accepted / max(self.rounds, 1),
            "slot_tau": 1.0 + float(full.sum()),
            "full_acceptance": full.round(5).tolist(),
            "conditional_acceptance": (self.right / np.maximum(self.before, 1)).round(5).tolist(),
        }

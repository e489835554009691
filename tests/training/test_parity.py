"""Acceptance in training is acceptance as served.

On the target's own greedy answers in float32, the draft tokens of the training graph and the walk over its hits are
what `generate` proposes and accepts, round by round.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.data.packing import Packed, pack
from eagle3_jax.training.evaluate import simulate
from eagle3_jax.training.features import Features
from eagle3_jax.training.metrics import walk
from eagle3_jax.training.step import Batch, Frozen, Setup, compute_features, evaluate_batch
from tests.training.conftest import ANSWER, DEEPEST, PROMPTS

LENGTH = 128


class Served:
    """The graph side: hits and top tokens (as target ids) of packed rows, and where each prompt's document lies."""

    def __init__(self, world, draft: e3.Draft):
        target = world.target
        self.world, self.draft = world, draft
        self.prompts, self.answers = world.prompts[:PROMPTS], world.answers[:PROMPTS]
        documents = [
            (np.array(p + a, np.int32), np.arange(len(p + a)) >= len(p))
            for p, a in zip(self.prompts, self.answers, strict=True)
        ]
        self.packed: Packed = pack(documents, LENGTH)
        assert self.packed.document_ids.max() >= 2  # several documents in a row
        self.setup = Setup(target.graph, draft.graph, draft.taps, None, DEEPEST, compute_dtype="float32")
        self.frozen = Frozen(target.params, {"embed_tokens": draft.params["embed_tokens"]}, jnp.asarray(draft.d2t))
        self.batch = Batch(self.packed.input_ids, self.packed.loss_mask, self.packed.document_ids)
        self.features = compute_features(self.setup, self.frozen, self.batch)
        self.hits = self.hits_of(self.features)
        logits = draft.ttt_forward(self.features.taps, self.batch.ids, DEEPEST, document_ids=self.packed.document_ids)
        self.tops = np.stack([draft.d2t[np.argmax(a, axis=-1)] for a in logits])
        self.places = [self._place(np.array(p + a)) for p, a in zip(self.prompts, self.answers, strict=True)]
        self.order = sorted(range(PROMPTS), key=lambda i: self.places[i])  # prompts in the order of the walk

    def hits_of(self, features: Features) -> np.ndarray:
        trainable = {key: value for key, value in self.draft.params.items() if key != "embed_tokens"}
        return np.asarray(evaluate_batch(self.setup, self.frozen, trainable, self.batch, features).hits)

    def walks(self, hits: np.ndarray, mask: np.ndarray | None = None) -> list[list[int]]:
        """Accepted counts of each prompt's answer."""
        walked = walk(hits, self.packed.loss_mask if mask is None else mask, self.packed.document_ids)
        assert len(walked) == PROMPTS
        return [walked[self.order.index(i)] for i in range(PROMPTS)]

    def _place(self, ids: np.ndarray) -> tuple[int, int]:
        found = [
            (row, start)
            for row, start in np.ndindex(len(self.packed.input_ids), LENGTH - len(ids) + 1)
            if np.array_equal(self.packed.input_ids[row, start : start + len(ids)], ids)
        ]
        assert len(found) == 1
        return found[0]


@pytest.fixture(scope="module")
def served(world, trained) -> Served:
    return Served(world, e3.load_draft(trained / "export", target=world.target))


@pytest.fixture(scope="module")
def results(served) -> Callable[[int], list[e3.Result]]:
    """What `generate` does with chains of a depth, all prompts as one ragged batch."""

    @functools.cache
    def get(depth: int) -> list[e3.Result]:
        return e3.generate(
            served.world.target, served.draft, served.prompts, ANSWER, f"chain:{depth}", stop_token_ids=()
        )

    return get


def assert_parity(served: Served, depth: int, walks: list[list[int]], results: dict[int, e3.Result]) -> None:
    for i, result in results.items():
        assert result.tokens == served.answers[i][:ANSWER]
        assert walks[i][: len(result.accepted)] == result.accepted
        row, start = served.places[i]
        slot = start + len(served.prompts[i]) - 1
        for accepted, proposed in zip(result.accepted, result.drafts, strict=True):
            known = min(accepted + 1, depth)  # after the first wrong one, the graph is fed with other tokens
            assert served.tops[:known, row, slot].tolist() == proposed[:known]
            slot += accepted + 1


@pytest.mark.parametrize("depth", [1, 3, DEEPEST])
def test_walk_and_drafts_are_those_of_generate(served, results, depth) -> None:
    counts = {accepted for result in results(depth) for accepted in result.accepted}
    assert {0, depth} <= counts and len(counts) >= min(depth + 1, 4)  # the draft is neither useless nor perfect
    assert_parity(served, depth, served.walks(served.hits[:depth]), dict(enumerate(results(depth))))


def test_a_single_request_too(served) -> None:
    results = {
        i: e3.generate(served.world.target, served.draft, served.prompts[i], ANSWER, "chain:3", stop_token_ids=())
        for i in (0, 3)
    }
    assert_parity(served, 3, served.walks(served.hits[:3]), results)


@pytest.mark.parametrize("depth", [1, 3, DEEPEST])
def test_an_answer_that_ends_has_the_same_rounds(served, results, depth) -> None:
    mask = served.packed.loss_mask.copy()
    for prompt, (row, start) in zip(served.prompts, served.places, strict=True):
        mask[row, start + len(prompt) + ANSWER :] &= (
            served.packed.document_ids[row, start + len(prompt) + ANSWER :] != (served.packed.document_ids[row, start])
        )
    for walked, result in zip(served.walks(served.hits[:depth], mask), results(depth), strict=True):
        assert len(walked) == len(result.accepted) and walked[:-1] == result.accepted[:-1]
        assert walked[-1] <= result.accepted[-1]  # all but the first token after the end is unknown to the walk


def test_simulated_tau_of_documents_is_the_walk(served) -> None:
    documents = [
        (np.array(p + a, np.int32), np.arange(len(p + a)) >= len(p))
        for p, a in zip(served.prompts, served.answers, strict=True)
    ]
    meter = simulate(served.world.target, served.draft, documents, DEEPEST, LENGTH, len(served.packed.input_ids))
    walks = served.walks(served.hits)
    assert (meter.accepted, meter.rounds) == (sum(map(sum, walks)), sum(map(len, walks)))
    summary = meter.summary()
    assert summary["simulated_tau"] == 1 + meter.accepted / meter.rounds
    assert 0 < summary["accuracy"] <= summary["accuracy_in_vocabulary"] <= 1


def test_hits_of_the_neighbouring_slot_are_not_it(served, results) -> None:
    for by in (-1, 1):
        with pytest.raises(AssertionError):
            walks = served.walks(np.roll(served.hits, by, axis=2)[:3])
            assert_parity(served, 3, walks, dict(enumerate(results(3))))


def test_features_in_another_order_are_not_it(served, results) -> None:
    a, b, c = served.features.taps.arrays
    for arrays in ((b, a, c), (a, c, b), (c, b, a)):
        swapped = served.features._replace(taps=e3.Taps(arrays, served.draft.taps))
        with pytest.raises(AssertionError):
            assert_parity(served, 3, served.walks(served.hits_of(swapped)[:3]), dict(enumerate(results(3))))

"""Held-out answers with the tokens that the draft would have given: what the acceptance numbers look like as text."""

from typing import Any

import numpy as np

from eagle3_jax.data.detokeniser import Detokeniser, Vocabulary
from eagle3_jax.errors import UserError
from eagle3_jax.training.dataset import batches_in_order
from eagle3_jax.training.metrics import Answer, walk_answers

GIVEN, DRAFTED, TARGET = "given", "drafted", "target"


def sample_answers(packed: Any, hits_of: Any, batch_rows: int, tokenizer: Any, count: int = 6) -> list[dict[str, Any]]:
    """The first `count` answers of packed rows as runs of text.

    hits_of: (rows, batch) -> bool [S, B, T-1], as `metrics.walk` takes them. Returns of each answer its tau and
    `tokens`, a list of [text, kind]: `given` (the prompt), `drafted` (proposed by the draft and accepted), `target`
    (the one token of each round that the target gives itself). Without a tokenizer the text is the token's id.
    """
    samples: list[dict[str, Any]] = []
    for rows, batch in batches_in_order(packed, batch_rows):
        for answer in walk_answers(hits_of(rows, batch), batch.loss_mask, batch.document_ids):
            if len(samples) == count:
                return samples
            if answer.accepted:
                samples.append(_sample(batch, answer, tokenizer))
    return samples


def _sample(batch: Any, answer: Answer, tokenizer: Any) -> dict[str, Any]:
    begin, end = answer.tokens
    start = int(np.argmax(batch.document_ids[answer.row] == answer.document))
    kinds = [GIVEN] * (begin - start) + [TARGET] * (end - begin)
    for slot, accepted in zip(answer.slots, answer.accepted, strict=True):
        first = slot + 2 - start  # the round's first draft token
        kinds[first : min(first + accepted, end - start)] = [DRAFTED] * (min(first + accepted, end - start) - first)
    ids = batch.ids[answer.row, start:end].tolist()
    tau = 1 + sum(answer.accepted) / len(answer.accepted)
    return {"simulated_tau": round(tau, 4), "tokens": _text(ids, kinds, tokenizer)}


def _text(ids: list[int], kinds: list[str], tokenizer: Any) -> list[list[str]]:
    """Texts of the tokens; a character of several tokens belongs to its last one. Ids where no text is known."""
    try:
        detokeniser = None if tokenizer is None else Detokeniser(Vocabulary(tokenizer))
    except UserError:  # of a kind whose text is not known, for which no finished training is thrown away
        detokeniser = None
    if detokeniser is None:
        return [[f"{token} ", kind] for token, kind in zip(ids, kinds, strict=True)]
    texts = [detokeniser.push(token) for token in ids]
    return [[text, kind] for text, kind in zip(texts, kinds, strict=True) if text]

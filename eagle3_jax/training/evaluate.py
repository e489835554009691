"""Simulated acceptance of a finished draft on given documents: the training graph and the walk, no training."""

import jax.numpy as jnp

from eagle3_jax.data.packing import pack
from eagle3_jax.data.template import Document
from eagle3_jax.draft.draft import Draft
from eagle3_jax.models.target import Target
from eagle3_jax.training.dataset import batches_in_order
from eagle3_jax.training.metrics import AcceptanceMeter
from eagle3_jax.training.step import Frozen, Setup, evaluate_batch


def simulate(
    target: Target, draft: Draft, documents: list[Document], depth: int, length: int, batch_rows: int = 4
) -> AcceptanceMeter:
    """Acceptance counts and walk of `depth` draft tokens over documents (ids, loss mask), packed to `length`.

    On the target's own greedy answers the walk is what `generate` accepts, in float32 round by round; only an answer's
    last round is cut at its end here and not there.
    """
    draft = draft.bind(target)
    setup = Setup(target.graph, draft.graph, draft.taps, None, depth, compute_dtype=str(draft.dtype))
    frozen = Frozen(target.params, draft.params, jnp.asarray(draft.d2t))
    meter = AcceptanceMeter(depth)
    for _, batch in batches_in_order(pack(documents, length), batch_rows):
        outcome = evaluate_batch(setup, frozen, {}, batch, None)
        meter.add_batch(outcome, batch)
    return meter

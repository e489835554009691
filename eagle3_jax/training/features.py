"""What the frozen target says about a batch: tapped features, last hidden state, and its own choice at each token.

`online`: the target runs in the same jitted step as the draft. `ram`: its output is kept in memory, row by row, so that
it runs once however many epochs follow (a row of 512 tokens of SmolLM2 takes 2.4 MB). Features stored by others
(training.stored) take the same form, so that nothing after this module knows the difference.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.draft.ttt import document_positions
from eagle3_jax.models.attention import causal
from eagle3_jax.models.decoder import CausalLM
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.taps import LastHidden, Taps, TapSet
from eagle3_jax.training.loss import Teacher

_SLOTS = 512  # of which full-vocabulary logits exist at once


class Features(NamedTuple):
    """taps: Taps of [B, T, H]; last: [B, T, H]; argmax: int32 [B, T], the target's choice.

    last says whether it is before the final norm (always so when computed here) or after it (some stored features).
    """

    taps: Taps
    last: LastHidden
    argmax: Int[Array, "B T"]


def target_features(
    graph: Graph, taps: TapSet, params: Params, ids: Int[Array, "B T"], document_ids: Int[Array, "B T"]
) -> Features:
    """One forward of the target over packed rows; attention and positions restart at each document."""
    model: CausalLM = graph.merge(params)
    last, tapped, _ = model(ids, document_positions(document_ids), causal(document_ids), taps=taps)
    return Features(tapped, last, _choices(model, last))


def complete(graph: Graph, params: Params, taps: Taps, last: LastHidden) -> Features:
    """Features from stored states: the target's choice follows from the last one, no block of the target runs."""
    return Features(taps, last, _choices(graph.merge(params), last))


def _choices(model: CausalLM, last: LastHidden) -> Int[Array, "B T"]:
    """The full-vocabulary argmax at each token."""

    # A few slots at a time: full-vocabulary logits of long rows would be the largest array of the step by far.
    def choice(slot: jax.Array) -> jax.Array:
        normed = LastHidden(slot, last.normed).after_norm(model.model.norm)
        return jnp.argmax(model.normed_logits(normed), axis=-1).astype(jnp.int32)

    slots = last.array.reshape(-1, last.array.shape[-1])
    return jax.lax.map(choice, slots, batch_size=_SLOTS).reshape(last.array.shape[:-1])


def teacher(graph: Graph, params: Params, features: Features, d2t: Int[Array, "Vd"]) -> Teacher:
    """Logits over the draft vocabulary from the last hidden state: final norm once, then the head's rows of d2t.

    A last hidden state stored after the norm is not normed again.
    """
    model: CausalLM = graph.merge(params)
    normed = features.last.after_norm(model.model.norm)
    return Teacher(model.normed_logits(normed, d2t), features.argmax)


class FeatureCache:
    """Features of packed rows in host memory, by row number."""

    def __init__(self):
        self._rows: dict[int, tuple] = {}
        self._structure = None

    def get(self, rows: list[int]) -> Features | None:
        """Features of these rows as a batch, or None if any is missing."""
        if any(row not in self._rows for row in rows):
            return None
        columns = zip(*(self._rows[row] for row in rows), strict=True)
        return jax.tree.unflatten(self._structure, [jnp.asarray(np.stack(column)) for column in columns])

    def put(self, rows: list[int], features: Features) -> None:
        leaves, self._structure = jax.tree.flatten(features)
        leaves = jax.device_get(leaves)
        for i, row in enumerate(rows):
            self._rows[row] = tuple(np.array(leaf[i]) for leaf in leaves)

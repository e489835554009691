"""What the frozen target says about a batch: tapped features, last hidden state, and its own choice at each token.

`online`: the target runs in the same jitted step as the draft. `ram`: its output is kept in memory, row by row, so that
it runs once however many epochs follow (a row of 512 tokens of SmolLM2 takes 2.4 MB).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.draft.ttt import document_positions
from eagle3_jax.models.attention import causal
from eagle3_jax.models.llama import LlamaForCausalLM, head_logits
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.taps import LastHidden, Taps, TapSet
from eagle3_jax.training.loss import Teacher


class Features(NamedTuple):
    """taps: Taps of [B, T, H]; last: [B, T, H] before the final norm; argmax: int32 [B, T], the target's choice."""

    taps: Taps
    last: LastHidden
    argmax: Int[Array, "B T"]


def target_features(
    graph: Graph, taps: TapSet, params: Params, ids: Int[Array, "B T"], document_ids: Int[Array, "B T"]
) -> Features:
    """One forward of the target over packed rows; attention and positions restart at each document."""
    model: LlamaForCausalLM = graph.merge(params)
    last, tapped, _ = model(ids, document_positions(document_ids), causal(document_ids), taps=taps)
    # Row by row: full-vocabulary logits of a whole batch would be the largest array of the step.
    argmax = jax.lax.map(
        lambda row: jnp.argmax(model.logits(LastHidden(row, last.normed)), axis=-1).astype(jnp.int32),
        last.before_norm(),
    )
    return Features(tapped, last, argmax)


def teacher(graph: Graph, params: Params, features: Features, d2t: Int[Array, "Vd"]) -> Teacher:
    """Logits over the draft vocabulary from the last hidden state: final norm once, then the head's rows of d2t."""
    model: LlamaForCausalLM = graph.merge(params)
    normed = model.model.norm(features.last.before_norm())
    return Teacher(head_logits(normed, model.head_weight[d2t]), features.argmax)


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

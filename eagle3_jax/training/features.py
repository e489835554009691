"""What the frozen target says about a batch: tapped features, last hidden state, and its own choice at each token.

`online`: the target runs in the same jitted step as the draft. `ram`: its output is kept in memory, row by row, so that
it runs once however many epochs follow (a row of 512 tokens of SmolLM2 takes 2.4 MB). Features stored by others
(training.stored) take the same form, so that nothing after this module knows the difference.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.ttt import document_positions
from eagle3_jax.models.attention import causal
from eagle3_jax.models.decoder import CausalLM
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.sharding import to_host
from eagle3_jax.taps import LastHidden, Taps, TapSet
from eagle3_jax.training.loss import Teacher
from eagle3_jax.training.visit import CHUNK, visit


class Features(NamedTuple):
    """taps: Taps of [B, T, H]; last: [B, T, H]; argmax: int32 [B, T], the target's choice; normaliser: float32 [B, T],
    log-sum-exp of its full-vocabulary logits; the last two at supervised tokens only, or None (`step._loss`).

    last says whether it is before the final norm (always so when computed here) or after it (some stored features).
    """

    taps: Taps
    last: LastHidden
    argmax: Int[Array, "B T"] | None
    normaliser: Float[Array, "B T"] | None


def run_target(
    graph: Graph, taps: TapSet, params: Params, ids: Int[Array, "B T"], document_ids: Int[Array, "B T"]
) -> tuple[Taps, LastHidden]:
    """One forward of the target over packed rows; attention and positions restart at each document."""
    model: CausalLM = graph.merge(params)
    lengths = None if model.config.rope_border is None else _document_lengths(document_ids)
    last, tapped, _ = model(ids, document_positions(document_ids), causal(document_ids), taps=taps, lengths=lengths)
    return tapped, last


def _document_lengths(document_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Of each token, how many tokens its document has in the row."""
    return (document_ids[:, :, None] == document_ids[:, None, :]).sum(-1, dtype=jnp.int32)


def complete(
    graph: Graph,
    params: Params,
    taps: Taps,
    last: LastHidden,
    wanted: Bool[Array, "B T"],
    chunk: int = CHUNK,
    groups: int = 1,
) -> Features:
    """Features from the target's states: its choice follows from the last one, no block of it runs.

    wanted, chunk, groups: see `choices`.
    """
    return Features(taps, last, *choices(graph.merge(params), last, wanted, chunk, groups))


def choices(
    model: CausalLM, last: LastHidden, wanted: Bool[Array, "B T"], chunk: int = CHUNK, groups: int = 1
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The full-vocabulary argmax at each wanted token (-1 elsewhere), and the log-sum-exp of its logits.

    Full-vocabulary logits of a whole batch would be the largest array of the step: they are made for about `chunk`
    tokens at a time (chunk x vocabulary x 4 bytes). groups: see `visit`.
    """

    def part(array: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple]:
        logits = model.normed_logits(LastHidden(array, last.normed).after_norm(model.model.norm))
        return (jnp.argmax(logits, axis=-1).astype(jnp.int32), jax.nn.logsumexp(logits, axis=-1)), ()

    (argmax, normaliser), _ = visit(part, last.array, wanted, chunk, groups)
    return jnp.where(wanted, argmax, -1), normaliser


def teacher(graph: Graph, params: Params, features: Features, d2t: Int[Array, "Vd"]) -> Teacher:
    """What the draft is taught, from the last hidden state: final norm once, then the head's rows of d2t.

    A last hidden state stored after the norm is not normed again.
    """
    model: CausalLM = graph.merge(params)
    states, head, covered = features.last.after_norm(model.model.norm), model.head_weight, None
    if features.argmax is not None:
        inside = jnp.zeros(head.shape[0], bool).at[d2t].set(True)
        covered = inside[features.argmax] & (features.argmax >= 0)
    return Teacher(states, head[d2t], model.config.logit_softcap, features.argmax, features.normaliser, covered)


class FeatureCache:
    """Features of packed rows in host memory, by row number. Of several processes each keeps all of them, since a row
    is on another one in every pass."""

    def __init__(self):
        self._rows: dict[int, tuple] = {}
        self._structure = None

    def has(self, rows: list[int]) -> bool:
        return all(row in self._rows for row in rows)

    def get(self, rows: list[int]) -> Features:
        """Features of these rows, all of which are there, as a batch."""
        columns = zip(*(self._rows[row] for row in rows), strict=True)
        return jax.tree.unflatten(self._structure, [jnp.asarray(np.stack(column)) for column in columns])

    def put(self, rows: list[int], features: Features) -> None:
        leaves, self._structure = jax.tree.flatten(features)
        leaves = to_host(leaves)
        for i, row in enumerate(rows):
            self._rows[row] = tuple(np.array(leaf[i]) for leaf in leaves)

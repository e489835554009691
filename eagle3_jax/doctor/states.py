"""The target's side: its residual stream at all points and its choices, once for each batch of documents."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle3_jax.data.packing import Packed, pack
from eagle3_jax.data.template import Document
from eagle3_jax.doctor.wiring import TEACHERS
from eagle3_jax.models.decoder import CausalLM
from eagle3_jax.models.target import Target
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.taps import TapSet, require
from eagle3_jax.training.dataset import batches_in_order
from eagle3_jax.training.features import run_target
from eagle3_jax.training.step import Batch

LENGTH = 512  # tokens of a packed row; longer documents are cut


class States(NamedTuple):
    """What the target says about a batch.

    stack: taps 0..N in canonical order, then (N+1) the last block's output after the final norm. choices: by teacher
    (`wiring.TEACHERS`), its most likely token after each token.
    """

    stack: Float[Array, "points B T H"]
    choices: Int[Array, "teachers B T"]


def select_documents(documents: list[Document], tokens: int) -> list[Document]:
    """The first documents that hold `tokens` tokens together (at least one document)."""
    lengths = np.cumsum([min(len(ids), LENGTH) for ids, _ in documents])
    return documents[: int(np.searchsorted(lengths, tokens)) + 1]


def pack_rows(documents: list[Document]) -> Packed:
    """Packed to the longest document, at most LENGTH. Raises UserError if nothing is supervised."""
    return pack(documents, max(2, min(LENGTH, max(len(ids) for ids, _ in documents))))


def batches(packed: Packed, tokens: int) -> Iterator[Batch]:
    """Batches of about `tokens` tokens, all of one shape."""
    rows = max(1, min(tokens // packed.input_ids.shape[1], len(packed.input_ids)))
    for _, batch in batches_in_order(packed, rows):
        yield batch


def target_states(target: Target, batch: Batch) -> States:
    """One forward of the target over packed rows."""
    return _target_states(target.graph, TapSet(range(target.num_layers + 1)), target.params, batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _target_states(graph: Graph, every: TapSet, params: Params, batch: Batch) -> States:
    taps, last = run_target(graph, every, params, batch.ids, batch.document_ids)
    require(taps.tap_set, every)
    model: CausalLM = graph.merge(params)
    last = last.before_norm()
    once = model.model.norm(last)

    def choice(hidden):
        # Row by row: full-vocabulary logits of a whole batch would be the largest array.
        return jax.lax.map(lambda row: jnp.argmax(model.normed_logits(row), axis=-1).astype(jnp.int32), hidden)

    choices = {name: choice(x) for name, x in zip(TEACHERS, (once, last, model.model.norm(once)), strict=True)}
    stack = jnp.stack([*taps.arrays, once])
    return States(stack, jnp.stack([choices[name] for name in TEACHERS]))


def own_answers(states: list[States], parts: list[Batch]) -> float:
    """Share of supervised tokens that are the target's greedy choice: 1 where it wrote the answers itself, greedily."""
    equal = total = 0
    for state, batch in zip(states, parts, strict=True):
        ids, documents = np.asarray(batch.ids), np.asarray(batch.document_ids)
        answered = np.asarray(batch.loss_mask)[:, 1:] & (documents[:, 1:] == documents[:, :-1])
        equal += int((np.asarray(state.choices[0])[:, :-1] == ids[:, 1:])[answered].sum())
        total += int(answered.sum())
    return equal / max(total, 1)

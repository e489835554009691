"""The jitted functions of training: one optimiser step, one evaluation of a batch.

Parameters are split once: `trainable` (float32 masters) and `frozen` (the target, the draft's embedding).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.ttt import document_positions, ttt_forward
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.taps import LastHidden, Taps, TapSet
from eagle3_jax.training.features import Features, complete, target_features, teacher
from eagle3_jax.training.loss import Acceptance, acceptance, feature_loss, hits, ttt_loss


class Setup(NamedTuple):
    """Static facts of the step (hashable: part of the jit key)."""

    target: Graph
    draft: Graph
    taps: TapSet
    optimiser: optax.GradientTransformation
    steps: int
    decay: float
    feature_loss: float
    compute_dtype: str


class Frozen(NamedTuple):
    """Arrays that training reads and never changes.

    draft: the draft's embedding, and its head if that is frozen. d2t: int32 [Vd], target id of each draft id.
    """

    target: Params
    draft: Params
    d2t: Int[Array, "Vd"]


class Batch(NamedTuple):
    """Packed rows. document_ids -1 is padding."""

    ids: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    document_ids: Int[Array, "B T"]


class TrainState(NamedTuple):
    trainable: Params
    optimiser: optax.OptState
    step: Int[Array, ""]


class Outcome(NamedTuple):
    """loss: total; losses [S]; hits bool [S, B, T-1]; counts: acceptance counts; grad_norm before clipping."""

    loss: Float[Array, ""]
    losses: Float[Array, "S"]
    hits: Bool[Array, "S B slots"]
    counts: Acceptance
    grad_norm: Float[Array, ""]


@functools.partial(jax.jit, static_argnums=0)
def compute_features(setup: Setup, frozen: Frozen, batch: Batch) -> Features:
    """The target's side of a batch, for keeping in memory."""
    return target_features(setup.target, setup.taps, frozen.target, batch.ids, batch.document_ids)


@functools.partial(jax.jit, static_argnums=0)
def complete_features(setup: Setup, frozen: Frozen, taps: Taps, last: LastHidden) -> Features:
    """The target's side of a batch from stored states."""
    return complete(setup.target, frozen.target, taps, last)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def train_step(
    setup: Setup,
    frozen: Frozen,
    state: TrainState,
    batch: Batch,
    features: Features | None,
    rate: Float[Array, ""],
) -> tuple[TrainState, Outcome]:
    """One optimiser step at `rate` times the peak learning rate.

    features None means online: the target runs inside this step.
    """
    if features is None:
        features = target_features(setup.target, setup.taps, frozen.target, batch.ids, batch.document_ids)
    grad_function = jax.value_and_grad(functools.partial(_loss, setup, frozen, batch, features), has_aux=True)
    (_, outcome), gradients = grad_function(state.trainable)
    updates, optimiser = setup.optimiser.update(gradients, state.optimiser, state.trainable)
    updates = jax.tree.map(lambda u: rate * u, updates)
    trainable = optax.apply_updates(state.trainable, updates)
    outcome = outcome._replace(grad_norm=optax.tree.norm(gradients))
    return TrainState(trainable, optimiser, state.step + 1), outcome


@functools.partial(jax.jit, static_argnums=0)
def evaluate_batch(setup: Setup, frozen: Frozen, trainable: Params, batch: Batch, features: Features | None) -> Outcome:
    """Loss and hits of a batch without a step."""
    if features is None:
        features = target_features(setup.target, setup.taps, frozen.target, batch.ids, batch.document_ids)
    return _loss(setup, frozen, batch, features, trainable)[1]


def _loss(setup: Setup, frozen: Frozen, batch: Batch, features: Features, trainable: Params):
    dtype = jnp.dtype(setup.compute_dtype)
    params = jax.tree.map(lambda p: p.astype(dtype), {**trainable, **frozen.draft})
    model = setup.draft.merge(params)
    taps = features.taps.map(lambda a: a.astype(dtype))
    positions = document_positions(batch.document_ids)
    step_logits, outputs = ttt_forward(model, taps, batch.ids, positions, batch.document_ids, setup.steps)
    target = teacher(setup.target, frozen.target, features, frozen.d2t)
    loss, losses = ttt_loss(step_logits, target.logits, batch.loss_mask, batch.document_ids, setup.decay)
    if setup.feature_loss:
        last = features.last.before_norm()
        loss += setup.feature_loss * feature_loss(outputs, last, batch.loss_mask, batch.document_ids)
    right = hits(step_logits, target.argmax, frozen.d2t)
    counts = acceptance(right, batch.loss_mask, batch.document_ids)
    return loss, Outcome(loss, jnp.stack(losses), right, counts, jnp.zeros(()))

"""The jitted functions of training: one optimiser step, one evaluation of a batch.

Parameters are split once: `trainable` (float32 masters) and `frozen` (the target, the draft's embedding).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.ttt import document_positions, ttt_outputs
from eagle3_jax.models.weights import Graph, Params
from eagle3_jax.sharding import Placement
from eagle3_jax.taps import LastHidden, Taps, TapSet
from eagle3_jax.training.features import Features, complete, run_target, teacher
from eagle3_jax.training.loss import (
    KL,
    Acceptance,
    LossOptions,
    Teacher,
    acceptance,
    feature_loss,
    hits,
    slot_masks,
    ttt_loss,
)
from eagle3_jax.training.visit import CHUNK

COVERED = LossOptions(skip_uncovered=True)


class Setup(NamedTuple):
    """Static facts of the step (hashable: part of the jit key).

    noise, seed: amplitude of uniform noise on the tapped features in training, and of its random numbers. accumulate:
    parts that a batch is computed in, one after another; the result is that of the whole. ema: decay of the average of
    the weights, or None. remat, chunk: see `ttt_outputs` and `visit`. placement: on which devices.
    """

    target: Graph
    draft: Graph
    taps: TapSet
    optimiser: optax.GradientTransformation
    steps: int
    loss: LossOptions = KL
    compute_dtype: str = "bfloat16"
    noise: float = 0.0
    seed: int = 0
    accumulate: int = 1
    ema: float | None = None
    remat: bool = False
    chunk: int = CHUNK
    placement: Placement = Placement(None)


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
    """average: the moving average of the weights with `Setup.ema`, else None."""

    trainable: Params
    optimiser: optax.OptState
    step: Int[Array, ""]
    average: Params | None = None

    @property
    def weights(self) -> Params:
        """What is evaluated and exported."""
        return self.trainable if self.average is None else self.average


class Outcome(NamedTuple):
    """loss: total; losses [S]; hits bool [S, B, T-1], of supervised slots; counts: acceptance counts; grad_norm
    before clipping; covered: supervised slots of the first step whose target choice is in the draft vocabulary, None
    where that is not computed of all (`_loss`)."""

    loss: Float[Array, ""]
    losses: Float[Array, "S"]
    hits: Bool[Array, "S B slots"]
    counts: Acceptance
    grad_norm: Float[Array, ""]
    covered: Int[Array, ""] | None


@functools.partial(jax.jit, static_argnums=0)
def compute_features(setup: Setup, frozen: Frozen, batch: Batch) -> Features:
    """The target's side of a batch, for keeping in memory."""
    return setup.placement.constrain_rows(_features_in_parts(setup, frozen, batch, None))


@functools.partial(jax.jit, static_argnums=0)
def complete_features(setup: Setup, frozen: Frozen, batch: Batch, taps: Taps, last: LastHidden) -> Features:
    """The target's side of a batch from stored states."""
    return setup.placement.constrain_rows(_completed(setup, frozen, batch, taps, last))


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
    gradients, outcome = _gradients(setup, frozen, state, batch, features)
    updates, optimiser = setup.optimiser.update(gradients, state.optimiser, state.trainable)
    updates = jax.tree.map(lambda u: rate * u, updates)
    trainable = optax.apply_updates(state.trainable, updates)
    average = state.average
    if setup.ema is not None:
        # Young averages follow the weights: where they began says nothing.
        decay = jnp.minimum(setup.ema, (1.0 + state.step) / (10.0 + state.step))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, trainable)
    outcome = outcome._replace(grad_norm=optax.tree.norm(gradients))
    state = TrainState(trainable, optimiser, state.step + 1, average)
    return setup.placement.constrain(state), setup.placement.whole(outcome)


@functools.partial(jax.jit, static_argnums=0)
def evaluate_batch(setup: Setup, frozen: Frozen, trainable: Params, batch: Batch, features: Features | None) -> Outcome:
    """Loss and hits of a batch without a step."""
    features = _features_in_parts(setup, frozen, batch, features)
    outcome = _loss(setup, frozen, batch, features, None, None, trainable)[1]
    return setup.placement.whole(outcome)


def _features(setup: Setup, frozen: Frozen, batch: Batch, features: Features | None, choose: bool = True) -> Features:
    """choose False: without the target's choices, see `_loss`."""
    if features is not None:
        return features
    taps, last = run_target(setup.target, setup.taps, frozen.target, batch.ids, batch.document_ids)
    return _completed(setup, frozen, batch, taps, last) if choose else Features(taps, last, None, None)


def _features_in_parts(setup: Setup, frozen: Frozen, batch: Batch, features: Features | None) -> Features:
    """The same, of `setup.accumulate` parts of the rows one after another."""
    whole = setup.accumulate == 1 or len(batch.ids) % (setup.accumulate * setup.placement.row_parts)
    if features is not None or whole:
        return _features(setup, frozen, batch, features)
    features = jax.lax.map(lambda part: _features(setup, frozen, part, None), _parts(setup, batch))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), features)


def _parts(setup: Setup, tree: Any) -> Any:
    """Arrays of rows as `setup.accumulate` parts of them."""
    parts = jax.tree.map(lambda a: a.reshape(setup.accumulate, -1, *a.shape[1:]), tree)
    return setup.placement.constrain_rows(parts, leading=1)


def _completed(setup: Setup, frozen: Frozen, batch: Batch, taps: Taps, last: LastHidden) -> Features:
    groups = setup.placement.row_parts
    return complete(setup.target, frozen.target, taps, last, batch.loss_mask, setup.chunk, groups)


def _gradients(setup: Setup, frozen: Frozen, state: TrainState, batch: Batch, features: Features | None):
    """Gradients and outcome of a batch, computed in `setup.accumulate` parts of its rows.

    Each part is averaged over the supervised slots of the whole batch, so that the parts add up to exactly it.
    """
    key = jax.random.fold_in(jax.random.key(setup.seed), state.step)
    grad_function = jax.grad(functools.partial(_loss, setup, frozen), argnums=4, has_aux=True)
    choose = setup.loss.needs_full_vocabulary
    if setup.accumulate == 1:
        return grad_function(batch, _features(setup, frozen, batch, features, choose), key, None, state.trainable)
    parts = _parts(setup, (batch, features))
    if features is None and setup.loss.needs_choice:
        # Of all parts at once, for the totals come first: the target's forward is most of a step, its features are not.
        features = jax.lax.map(lambda part: _features(setup, frozen, part, None), parts[0])
        parts = parts[0], features
    keys = jax.random.split(key, setup.accumulate)
    totals = jax.lax.map(lambda part: _totals(setup, frozen, *part), parts)
    totals = jax.tree.map(lambda a: a.sum(0).astype(jnp.float32), totals)

    def add(gradients, part):
        batch, features, key = part
        features = _features(setup, frozen, batch, features, choose)
        new, outcome = grad_function(batch, features, key, totals, state.trainable)
        return jax.tree.map(jnp.add, gradients, new), outcome

    zeros = jax.tree.map(jnp.zeros_like, state.trainable)
    gradients, outcomes = jax.lax.scan(add, zeros, (*parts, keys))
    hits = jnp.swapaxes(outcomes.hits, 0, 1).reshape(setup.steps, -1, outcomes.hits.shape[-1])
    summed = jax.tree.map(lambda a: a.sum(0), outcomes._replace(hits=outcomes.loss))
    return gradients, summed._replace(hits=hits)


def _totals(setup: Setup, frozen: Frozen, batch: Batch, features: Features | None):
    """Slots with a loss and supervised slots of each step: what parts of a batch are averaged over."""
    steps, options = setup.steps, setup.loss
    plain = slot_masks(KL, Teacher(None), batch.loss_mask, batch.document_ids, steps).sum((1, 2))
    if not options.needs_choice:
        return plain, plain
    target = teacher(setup.target, frozen.target, _features(setup, frozen, batch, features), frozen.d2t)
    return slot_masks(options, target, batch.loss_mask, batch.document_ids, steps).sum((1, 2)), plain


def _loss(setup: Setup, frozen: Frozen, batch: Batch, features: Features, key, totals, trainable: Params):
    """(loss, outcome). key: of the noise on the features, None for none. totals: see `_totals`; None = the batch's.

    Features without the target's choices: these are then made only where the draft has what the target prefers of the
    draft vocabulary, since it is wrong elsewhere, whatever the target's choice is.
    """
    dtype = jnp.dtype(setup.compute_dtype)
    params = jax.tree.map(lambda p: p.astype(dtype), {**trainable, **frozen.draft})
    model = setup.draft.merge(params)
    taps = features.taps.map(lambda a: a.astype(dtype))
    if setup.noise and key is not None:
        keys = iter(jax.random.split(key, len(taps.arrays)))
        taps = taps.map(lambda a: a + jax.random.uniform(next(keys), a.shape, dtype, -setup.noise, setup.noise))
    positions = document_positions(batch.document_ids)
    inputs = (batch.ids, positions, batch.document_ids)
    outputs = ttt_outputs(model, taps, *inputs, setup.steps, setup.remat)
    target = teacher(setup.target, frozen.target, features, frozen.d2t)
    slots, plain = (None, None) if totals is None else totals
    supervision = target, batch.loss_mask, batch.document_ids, setup.loss, slots
    head, groups = model.lm_head.weight[...], setup.placement.row_parts
    states = [model.norm(y) for y in outputs]
    loss, losses, choices, preferred = ttt_loss(states, *supervision, head, setup.chunk, groups)
    if setup.loss.feature:
        last = features.last.before_norm()
        loss += setup.loss.feature * feature_loss(outputs, last, batch.loss_mask, batch.document_ids, plain)
    argmax = target.argmax
    if argmax is None:
        perhaps = batch.loss_mask & jnp.any(choices == preferred[..., None], axis=-1)
        argmax = _completed(setup, frozen, batch._replace(loss_mask=perhaps), features.taps, features.last).argmax
    right = hits(choices, argmax, frozen.d2t)
    counts = acceptance(right, batch.loss_mask, batch.document_ids)
    covered = None
    if target.covered is not None:
        covered = jnp.sum(slot_masks(COVERED, target, batch.loss_mask, batch.document_ids, 1))
    return loss, Outcome(loss, losses, right, counts, jnp.zeros(()), covered)

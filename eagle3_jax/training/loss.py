"""TTT loss and acceptance counts (paper section 3.2; spec section 4.3).

Loss of step s: KL(p || q) over the draft vocabulary, p the target's distribution at token t+1+s restricted to that
vocabulary and renormalised, averaged over supervised slots (mask of token t+1+s); steps are summed with weight decay^s.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.ttt import shift, slot_valid


class Teacher(NamedTuple):
    """What the target says at each token of a batch.

    logits: float32 [B, T, Vd], its logits over the draft vocabulary. argmax: int32 [B, T], its full-vocabulary choice,
    as a target id. Both at token t speak of token t+1.
    """

    logits: Float[Array, "B T Vd"]
    argmax: Int[Array, "B T"]


def supervised(loss_mask: Bool[Array, "B T"], document_ids: Int[Array, "B T"], step: int) -> Bool[Array, "B slots"]:
    """Slots that count at `step`: token t+1+s is supervised and lies in the document of token t."""
    return shift(loss_mask, 1 + step, False)[:, :-1] & slot_valid(document_ids, step)


def kl_divergence(target: Float[Array, "*rows Vd"], draft: Float[Array, "*rows Vd"]) -> Float[Array, "*rows"]:
    """KL(softmax(target) || softmax(draft)) from logits, per row."""
    log_p, log_q = jax.nn.log_softmax(target, axis=-1), jax.nn.log_softmax(draft, axis=-1)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def ttt_loss(
    step_logits: list[Float[Array, "B slots Vd"]],
    teacher_logits: Float[Array, "B T Vd"],
    loss_mask: Bool[Array, "B T"],
    document_ids: Int[Array, "B T"],
    decay: float = 1.0,
) -> tuple[Float[Array, ""], list[Float[Array, ""]]]:
    """Total loss and the masked mean KL of each step."""
    losses = []
    for step, logits in enumerate(step_logits):
        mask = supervised(loss_mask, document_ids, step)
        kl = kl_divergence(shift(teacher_logits, 1 + step)[:, :-1], logits)
        losses.append(jnp.sum(jnp.where(mask, kl, 0.0)) / (jnp.sum(mask) + 1e-5))
    return sum(decay**step * loss for step, loss in enumerate(losses)), losses


def feature_loss(
    outputs: list[Float[Array, "B slots H"]],
    last_hidden: Float[Array, "B T H"],
    loss_mask: Bool[Array, "B T"],
    document_ids: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Masked mean over slots, summed over steps, of |y - h|^2 / |h|^2 with h the target's last hidden at token t+1+s.

    EAGLE-1's feature regression in relative form. The draft's head starts as the target's, so matching h would match
    the target's logits.
    """
    total = jnp.zeros(())
    for step, y in enumerate(outputs):
        mask = supervised(loss_mask, document_ids, step)
        h = shift(last_hidden, 1 + step)[:, :-1].astype(jnp.float32)
        distance = jnp.sum(jnp.square(y.astype(jnp.float32) - h), axis=-1) / (jnp.sum(jnp.square(h), axis=-1) + 1e-6)
        total += jnp.sum(jnp.where(mask, distance, 0.0)) / (jnp.sum(mask) + 1e-5)
    return total


class Acceptance(NamedTuple):
    """Counts per step [S], summable over batches: slots right at all steps <= s, supervised slots, right before s."""

    right: Int[Array, "S"]
    total: Int[Array, "S"]
    before: Int[Array, "S"]


def hits(
    step_logits: list[Array], teacher_argmax: Int[Array, "B T"], d2t: Int[Array, "Vd"]
) -> Bool[Array, "S B slots"]:
    """Whether step s's top token at slot t is the target's choice; a choice outside the draft vocabulary is a miss."""
    return jnp.stack(
        [
            d2t[jnp.argmax(logits, axis=-1)] == shift(teacher_argmax, 1 + step, -1)[:, :-1]
            for step, logits in enumerate(step_logits)
        ]
    )


def acceptance(
    hits: Bool[Array, "S B slots"], loss_mask: Bool[Array, "B T"], document_ids: Int[Array, "B T"]
) -> Acceptance:
    """Full and conditional acceptance counts over supervised slots.

    A slot counts at depth s if its tokens t+1 .. t+1+s are all supervised and in its document, so that what precedes an
    answer and what would follow its end are in neither numerator nor denominator.
    """
    steps = range(hits.shape[0])
    masks = jnp.cumprod(jnp.stack([supervised(loss_mask, document_ids, s) for s in steps]), axis=0).astype(bool)
    right = jnp.cumprod(hits & masks, axis=0).astype(bool)
    before = jnp.concatenate([masks[:1], right[:-1] & masks[1:]])
    return Acceptance(right.sum((1, 2)), masks.sum((1, 2)), before.sum((1, 2)))

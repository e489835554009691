"""TTT loss and acceptance counts (paper section 3.2; spec section 4.3).

Loss of step s: a divergence of the draft's distribution at slot t from the target's at token t+1+s, averaged over
supervised slots (mask of token t+1+s); steps are summed with weight decay^s. `LossOptions.kind` says which divergence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from eagle3_jax.draft.ttt import shift, slot_valid
from eagle3_jax.models.decoder import head_logits
from eagle3_jax.training.visit import CHUNK, visit


class LossOptions(NamedTuple):
    """Static facts of the loss: see config.LossConfig."""

    kind: str = "kl"
    decay: float = 1.0
    skip_uncovered: bool = False
    lk_decay: float = 3.0
    feature: float = 0.0

    @property
    def needs_choice(self) -> bool:
        """Whether the slots that have a loss depend on what the target chose there."""
        return self.skip_uncovered or self.kind == "hard_ce"

    @property
    def needs_full_vocabulary(self) -> bool:
        """Whether it depends on the target's logits outside the draft vocabulary."""
        return self.needs_choice or self.kind in ("lk_alpha", "lk_lambda")


KL = LossOptions()


class Teacher(NamedTuple):
    """What the target says at each token of a batch; at token t it speaks of token t+1.

    states: its normed last hidden states, of which `rows` of its head (and `cap`, see `head_logits`) make logits over
    the draft vocabulary; rows None: those logits themselves. argmax: its full-vocabulary choice, as a target id.
    normaliser: the log-sum-exp of its full-vocabulary logits (for the LK losses). covered: whether its choice is in the
    draft vocabulary (where the loss asks).
    """

    states: Float[Array, "B T width"] | None
    rows: Float[Array, "Vd width"] | None = None
    cap: float | None = None
    argmax: Int[Array, "B T"] | None = None
    normaliser: Float[Array, "B T"] | None = None
    covered: Bool[Array, "B T"] | None = None

    def logits(self, states: Float[Array, "*tokens width"]) -> Float[Array, "*tokens Vd"]:
        """float32, of some of the states."""
        return states if self.rows is None else head_logits(states, self.rows, self.cap)


def supervised(loss_mask: Bool[Array, "B T"], document_ids: Int[Array, "B T"], step: int) -> Bool[Array, "B slots"]:
    """Slots that count at `step`: token t+1+s is supervised and lies in the document of token t."""
    return shift(loss_mask, 1 + step, False)[:, :-1] & slot_valid(document_ids, step)


def kl_divergence(target: Float[Array, "*rows Vd"], draft: Float[Array, "*rows Vd"]) -> Float[Array, "*rows"]:
    """KL(softmax(target) || softmax(draft)) from logits, per row."""
    log_p, log_q = jax.nn.log_softmax(target, axis=-1), jax.nn.log_softmax(draft, axis=-1)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def soft_cross_entropy(target: Float[Array, "*rows Vd"], draft: Float[Array, "*rows Vd"]) -> Float[Array, "*rows"]:
    """-sum p log q from logits, per row: the KL divergence plus the target's entropy, so of the same gradient."""
    return -jnp.sum(jax.nn.softmax(target, axis=-1) * jax.nn.log_softmax(draft, axis=-1), axis=-1)


def hard_cross_entropy(target: Float[Array, "*rows Vd"], draft: Float[Array, "*rows Vd"]) -> Float[Array, "*rows"]:
    """-log q of the target's likeliest token of the draft vocabulary, per row."""
    label = jnp.argmax(target, axis=-1)[..., None]
    return -jnp.take_along_axis(jax.nn.log_softmax(draft, axis=-1), label, axis=-1)[..., 0]


def overlap(
    target: Float[Array, "*rows Vd"], normaliser: Float[Array, "*rows"], draft: Float[Array, "*rows Vd"]
) -> Float[Array, "*rows"]:
    """sum min(p, q) per row: the probability that speculative sampling at temperature 1 accepts the draft's token.

    p is the target's full-vocabulary distribution, of which the draft vocabulary holds a part (Leviathan et al. 2023,
    definition 3.2; the LK losses maximise it).
    """
    p = jnp.exp(target - normaliser[..., None])
    return jnp.sum(jnp.minimum(p, jax.nn.softmax(draft, axis=-1)), axis=-1)


def divergence(options: LossOptions, target, normaliser, draft) -> Float[Array, "*rows"]:
    """The loss of each row before masking. lk_alpha: -log overlap. lk_lambda: w KL + (1 - w) (1 - overlap), where
    w = exp(-lk_decay overlap) moves from KL to the overlap as the row is learnt."""
    if options.kind == "kl":
        return kl_divergence(target, draft)
    if options.kind == "ce":
        return soft_cross_entropy(target, draft)
    if options.kind == "hard_ce":
        return hard_cross_entropy(target, draft)
    accepted = overlap(target, normaliser, draft)
    if options.kind == "lk_alpha":
        return -jnp.log(accepted + 1e-6)
    weight = jnp.exp(-options.lk_decay * jax.lax.stop_gradient(accepted))
    return weight * kl_divergence(target, draft) + (1 - weight) * (1 - accepted)


def slot_masks(
    options: LossOptions,
    teacher: Teacher,
    loss_mask: Bool[Array, "B T"],
    document_ids: Int[Array, "B T"],
    steps: int,
) -> Bool[Array, "S B slots"]:
    """Slots that have a loss at each step: those supervised, and with skip_uncovered (always for hard_ce) only where
    the target's choice is in the draft vocabulary."""
    masks = [supervised(loss_mask, document_ids, step) for step in range(steps)]
    if options.needs_choice:
        masks = [mask & shift(teacher.covered, 1 + step, False)[:, :-1] for step, mask in enumerate(masks)]
    return jnp.stack(masks)


class Taught(NamedTuple):
    """total: the loss; losses: the masked mean of each step. At supervised tokens, as draft ids: choices: the draft's,
    that of step s at token t+1+s, by which its slot t is taught; preferred: the target's, of the draft vocabulary."""

    total: Float[Array, ""]
    losses: Float[Array, "S"]
    choices: Int[Array, "B T S"]
    preferred: Int[Array, "B T"]


def ttt_loss(
    states: list[Float[Array, "B slots width"]],
    teacher: Teacher,
    loss_mask: Bool[Array, "B T"],
    document_ids: Int[Array, "B T"],
    options: LossOptions = KL,
    totals: Float[Array, "S"] | None = None,
    head: Float[Array, "Vd width"] | None = None,
    chunk: int = CHUNK,
    groups: int = 1,
) -> Taught:
    """The loss of a batch. Gradients are those of the total.

    states: the draft's normed outputs of each step, of which `head` makes logits; head None: those logits themselves.
    totals: slots of each step to average over, where the batch is a part of a larger one; None = its own. Logits exist
    for about `chunk` tokens at a time, and gradients are computed right with them; groups: see `visit`.
    """
    masks = slot_masks(options, teacher, loss_mask, document_ids, len(states))
    totals = masks.sum((1, 2)).astype(jnp.float32) if totals is None else totals
    shares = at_tokens(list(masks / (totals[:, None, None] + 1e-5)))
    given = teacher.states, teacher.normaliser, shares

    def part(states, head, taught, normaliser, shares):
        logits = states if head is None else head_logits(states, head)
        target = teacher.logits(taught)
        loss = jax.vmap(lambda q: divergence(options, target, normaliser, q), in_axes=-2, out_axes=-1)(logits)
        losses = jnp.sum(jnp.where(shares > 0, loss, 0.0) * shares, axis=(0, 1))
        total = sum(options.decay**step * losses[step] for step in range(len(losses)))
        choices, preferred = (jnp.argmax(x, axis=-1).astype(jnp.int32) for x in (logits, target))
        return total, (losses, (choices, preferred))

    @jax.custom_vjp
    def run(states, head):
        def values(tokens):
            total, (losses, choices) = part(tokens[0], head, *tokens[1])
            return choices, (total, losses)

        choices, (total, losses) = visit(values, (states, given), loss_mask, chunk, groups)
        return Taught(total, losses, *choices)

    def forward(states, head):
        def values(tokens):
            differentiated = jax.value_and_grad(part, argnums=(0, 1), has_aux=True)
            (total, (losses, choices)), (of_states, of_head) = differentiated(tokens[0], head, *tokens[1])
            return (choices, of_states), (total, losses, jax.tree.map(lambda g: g.astype(jnp.float32), of_head))

        (choices, of_states), (total, losses, of_head) = visit(values, (states, given), loss_mask, chunk, groups)
        return Taught(total, losses, *choices), (of_states, jax.tree.map(lambda g, p: g.astype(p.dtype), of_head, head))

    def backward(gradients, cotangents):
        return jax.tree.map(lambda g: (cotangents[0] * g).astype(g.dtype), gradients)

    run.defvjp(forward, backward)
    return run(at_tokens(states), head)


def at_tokens(steps: list[Shaped[Array, "B slots ..."]]) -> Shaped[Array, "B T S ..."]:
    """What slot t has at step s, at the token t+1+s that teaches it; zero where there is no such slot."""
    slots, moved = steps[0].shape[1], []
    for step, x in enumerate(steps):
        kept = max(slots - step, 0)
        moved.append(jnp.pad(x[:, :kept], [(0, 0), (slots + 1 - kept, 0)] + [(0, 0)] * (x.ndim - 2)))
    return jnp.stack(moved, axis=2)


def feature_loss(
    outputs: list[Float[Array, "B slots H"]],
    last_hidden: Float[Array, "B T H"],
    loss_mask: Bool[Array, "B T"],
    document_ids: Int[Array, "B T"],
    totals: Float[Array, "S"] | None = None,
) -> Float[Array, ""]:
    """Masked mean over slots, summed over steps, of |y - h|^2 / |h|^2 with h the target's last hidden at token t+1+s.

    EAGLE-1's feature regression in relative form. The draft's head starts as the target's, so matching h would match
    the target's logits. totals: as for `ttt_loss`, of supervised slots.
    """
    total = jnp.zeros(())
    for step, y in enumerate(outputs):
        mask = supervised(loss_mask, document_ids, step)
        h = shift(last_hidden, 1 + step)[:, :-1].astype(jnp.float32)
        distance = jnp.sum(jnp.square(y.astype(jnp.float32) - h), axis=-1) / (jnp.sum(jnp.square(h), axis=-1) + 1e-6)
        count = jnp.sum(mask) if totals is None else totals[step]
        total += jnp.sum(jnp.where(mask, distance, 0.0)) / (count + 1e-5)
    return total


class Acceptance(NamedTuple):
    """Counts per step [S], summable over batches: slots right at all steps <= s, supervised slots, right before s."""

    right: Int[Array, "S"]
    total: Int[Array, "S"]
    before: Int[Array, "S"]


def hits(
    choices: Int[Array, "B T S"], teacher_argmax: Int[Array, "B T"], d2t: Int[Array, "Vd"]
) -> Bool[Array, "S B slots"]:
    """Whether step s's top token at slot t is the target's choice; a choice outside the draft vocabulary is a miss.

    choices: as from `ttt_loss`, and meaningful where those are.
    """
    right = d2t[choices] == teacher_argmax[..., None]
    return jnp.stack([shift(right[..., step], 1 + step, False)[:, :-1] for step in range(choices.shape[-1])])


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

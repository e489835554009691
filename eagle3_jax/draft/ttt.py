"""The training graph: S draft steps unrolled over whole sequences ("training-time test", paper section 3.2, spec 4).

Slot t of step s holds the hidden state of token t (fc of target features at s = 0, the draft's own output later) and
the embedding of token t+1+s; it predicts token t+2+s. At step s slot t sees the step-0 keys of slots j <= t of its
document and its own keys of steps 1..s, which is what serving sees after s accepted draft tokens. These later keys
are a diagonal, so s extra columns replace a T x sT mask. Gradients flow through all steps.

A layer with a window of w sees the step-0 keys t-w+1..t and all its own later keys, as in speculators: w + s positions
in all, since the window is anchored at the last token with target features. Serving does the same (`speculate.round`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.network import DraftModel
from eagle3_jax.models.attention import BLOCK, by_blocks, head_scores, mix_values, row_mask, row_slots
from eagle3_jax.taps import Taps


def ttt_outputs(
    model: DraftModel,
    taps: Taps,
    ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    document_ids: Int[Array, "B T"],
    steps: int,
    remat: bool = False,
    block: int = BLOCK,
) -> list[Float[Array, "B slots H"]]:
    """The draft's outputs y of each step, before the final norm: S arrays [B, T-1, H], meaningful where `slot_valid`
    says so.

    remat: compute each step again in the backward pass instead of keeping its activations, so that memory grows with
    one step and not with all. block: queries that attend at a time; the scores of longer rows are computed again in any
    case (`attention.by_blocks`).
    """
    slots = ids.shape[1] - 1
    attend = _ttt_attention(document_ids[:, :-1], block)
    hidden = model.project(taps.map(lambda a: a[:, :-1]))
    caches: tuple = ((),) * len(model.layers)
    outputs = []

    def one(hidden, tokens, places, caches):
        return model(hidden, tokens, places, attend, caches)

    one = jax.checkpoint(one) if remat else one
    for step in range(steps):
        y, caches = one(hidden, shift(ids, 1 + step)[:, :slots], positions[:, :-1] + step, caches)
        outputs.append(y)
        hidden = model.feedback(y)
    return outputs


def ttt_forward(model: DraftModel, *inputs, **options) -> list[Float[Array, "B slots Vd"]]:
    """Draft logits of each step, S arrays [B, T-1, Vd] float32; arguments are those of `ttt_outputs`."""
    return [model.logits(y) for y in ttt_outputs(model, *inputs, **options)]


def shift(x: Array, by: int, fill=0) -> Array:
    """x[:, t + by] at place t; `fill` past the end."""
    widths = [(0, 0), (0, min(by, x.shape[1]))] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x[:, by:], widths, constant_values=fill)


def slot_valid(document_ids: Int[Array, "B T"], step: int) -> Bool[Array, "B slots"]:
    """Slots of `step` whose token t+1+s exists in the document of token t (padding, id -1, is never valid)."""
    same = shift(document_ids, 1 + step, -1)[:, :-1] == document_ids[:, :-1]
    return same & (document_ids[:, :-1] >= 0)


def document_positions(document_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """0, 1, 2, ... restarting where the document id changes."""
    slots = jnp.arange(document_ids.shape[1])
    begins = jnp.pad(document_ids[:, 1:] != document_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return slots - jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)


def _ttt_attention(document_ids: Int[Array, "B slots"], block: int):
    """An `attend` whose layer cache is the tuple of (k, v) of all steps so far, each [B, T, K, D]."""

    def attend(q, k, v, cache, window=None):
        cache = (*cache, (k, v))
        # float32 before the blocks, over which the gradients of keys and values are added up.
        (first_k, first_v), later = (x.astype(jnp.float32) for x in cache[0]), cache[1:]
        count, groups = first_k.shape[1], q.shape[2] // k.shape[2]

        def part(slots, q, later):
            scores = [jnp.where(row_mask(slots, document_ids, window)[:, None], head_scores(q, first_k), -jnp.inf)]
            for step_k, _ in later:
                own = jnp.sum(q.astype(jnp.float32) * jnp.repeat(step_k, groups, axis=2), axis=-1) * q.shape[-1] ** -0.5
                scores.append(own.transpose(0, 2, 1)[..., None])
            weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
            out = mix_values(weights[..., :count], first_v, jnp.float32)
            for i, (_, step_v) in enumerate(later):
                own = weights[..., count + i].transpose(0, 2, 1)[..., None]
                out += own * jnp.repeat(step_v, groups, axis=2)
            return out.astype(q.dtype)

        return by_blocks(part, block, row_slots(document_ids), q, later), cache

    return attend

"""The training graph: S draft steps unrolled over whole sequences ("training-time test", paper section 3.2, spec 4).

Slot t of step s holds the hidden state of token t (fc of target features at s = 0, the draft's own output later) and
the embedding of token t+1+s; it predicts token t+2+s. At step s slot t sees the step-0 keys of slots j <= t of its
document and its own keys of steps 1..s, which is what serving sees after s accepted draft tokens. These later keys
are a diagonal, so s extra columns replace a T x sT mask. Gradients flow through all steps.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.draft.network import DraftModel
from eagle3_jax.taps import Taps


def ttt_forward(
    model: DraftModel,
    taps: Taps,
    ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    document_ids: Int[Array, "B T"],
    steps: int,
) -> list[Float[Array, "B slots Vd"]]:
    """Draft logits of each step, S arrays [B, T-1, Vd] float32; meaningful where `slot_valid` says so."""
    slots = ids.shape[1] - 1
    attend = _ttt_attention(document_ids[:, :-1])
    hidden = model.project(taps.map(lambda a: a[:, :-1]))
    caches: tuple = ((),) * len(model.layers)
    logits = []
    for step in range(steps):
        y, caches = model(hidden, shift(ids, 1 + step)[:, :slots], positions[:, :-1] + step, attend, caches)
        logits.append(model.logits(y))
        hidden = model.feedback(y)
    return logits


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


def _ttt_attention(document_ids: Int[Array, "B slots"]):
    """An `attend` whose layer cache is the tuple of (k, v) of all steps so far, each [B, T, K, D]."""
    slots = jnp.arange(document_ids.shape[1])
    mask = (slots[:, None] >= slots[None, :]) & (document_ids[:, :, None] == document_ids[:, None, :])

    def attend(q, k, v, cache):
        cache = (*cache, (k, v))
        (first_k, first_v), later = cache[0], cache[1:]
        b, t, n, d = q.shape
        q = q.reshape(b, t, k.shape[2], n // k.shape[2], d)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, first_k, preferred_element_type=jnp.float32)
        scores = [jnp.where(mask[:, None, None], scores * d**-0.5, -jnp.inf)]
        for step_k, _ in later:
            diagonal = jnp.einsum("btkgd,btkd->bkgt", q, step_k, preferred_element_type=jnp.float32)
            scores.append(diagonal[..., None] * d**-0.5)
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(v.dtype)
        out = jnp.einsum("bkgts,bskd->btkgd", weights[..., :t], first_v)
        for i, (_, step_v) in enumerate(later):
            out += weights[..., t + i].transpose(0, 3, 1, 2)[..., None] * step_v[:, :, :, None, :]
        return out.reshape(b, t, n, d), cache

    return attend

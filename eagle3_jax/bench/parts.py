"""The parts of a round, timed alone: what speculation can gain at most with a pair on a device.

    v   verification: the target reads so many rows at once
    d   a draft step: one more draft token a sequence, or several side by side in a tree

both in plain rounds. A round of K levels costs v + K d at least, so that it speeds up by at most tau / (v + K d).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eagle3_jax.draft.draft import Draft
from eagle3_jax.draft.network import DraftModel
from eagle3_jax.models.attention import KV, cached
from eagle3_jax.models.decoder import CausalLM
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.cost import compare_each
from eagle3_jax.speculate.drafting import fast_rows
from eagle3_jax.speculate.generate import begin
from eagle3_jax.speculate.request import SamplingParams, spread
from eagle3_jax.speculate.round import Models, Weights, cache_room, speculate
from eagle3_jax.speculate.strategy import PLAIN, Strategy
from eagle3_jax.taps import Taps


class Verifying(NamedTuple):
    """What one call of `verify` hands to the next. length: tokens before the block `ids`."""

    cache: tuple[KV, ...]
    length: jax.Array
    ids: jax.Array


class Drafting(NamedTuple):
    """What one call of `draft_step` hands to the next. length: tokens in the draft's cache."""

    cache: tuple[KV, ...]
    length: jax.Array
    ids: jax.Array
    hidden: jax.Array


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def verify(models: Models, weights: Weights, carry: Verifying) -> tuple[Verifying, tuple[jax.Array, Taps]]:
    """The target's share of a round: its choice after each token of the block, and the taps the draft reads next."""
    target: CausalLM = models.target.merge(weights.target)
    positions = carry.length[:, None] + jnp.arange(carry.ids.shape[1])
    last, taps, cache = target(carry.ids, positions, cached(positions), carry.cache, models.taps)
    return models.placement.kept((carry._replace(cache=cache), (jnp.argmax(target.logits(last), axis=-1), taps)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def draft_step(models: Models, weights: Weights, carry: Drafting) -> tuple[Drafting, jax.Array]:
    """One more draft token below each of ids."""
    draft: DraftModel = models.draft.merge(weights.draft)
    positions = carry.length[:, None] + jnp.arange(carry.ids.shape[1])
    y, cache = draft(carry.hidden, carry.ids, positions, cached(positions), carry.cache)
    ids = weights.d2t[jnp.argmax(draft.logits(y), axis=-1)]
    return models.placement.kept((Drafting(cache, carry.length, ids, draft.feedback(y)), ids))


class Parts(NamedTuple):
    """Costs in plain rounds. verification: of a strategy's nodes; step: of one of its draft steps. step_floor: what
    reading the weights of a draft step takes, where a plain round takes the time of reading the target's."""

    verification: Mapping[Strategy, float]
    step: Mapping[Strategy, float]
    step_floor: float

    def bound(self, shares: Mapping[Strategy, float], tau: float) -> float:
        """The most that rounds of these strategies, of each so large a share, can speed up plain decoding."""
        return tau / sum(share * self._round(strategy) for strategy, share in shares.items())

    def _round(self, strategy: Strategy) -> float:
        return self.verification[strategy] + strategy.depth * self.step[strategy] if strategy.depth else 1.0


def measure_parts(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    strategies: Sequence[Strategy],
    sampling: SamplingParams,
) -> Parts:
    """The parts of rounds of these strategies after these prompts, taking turns with plain rounds."""
    drafting = [strategy for strategy in strategies if strategy.depth]
    batch, params = len(prompts), spread(sampling, len(prompts))
    alone = begin(target, None, prompts, params, [PLAIN])
    widest = max(drafting, key=lambda strategy: cache_room(strategy, batch))
    models, weights, state, _ = begin(target, draft, prompts, params, [widest])
    rows = {strategy: fast_rows(strategy.nodes, batch) for strategy in drafting}
    beams = {strategy: fast_rows(strategy.top_k, batch) for strategy in drafting}
    ids = state.pending[:, None]
    carries = {("plain", 1): alone.state}
    for count in set(rows.values()):
        carries["verify", count] = Verifying((), jnp.copy(state.length), jnp.repeat(ids, count, axis=1))
    for count in set(beams.values()):
        below = (jnp.repeat(x, count, axis=1) for x in (ids, state.draft.hidden))
        carries["step", count] = Drafting((), jnp.copy(state.length), *below)
    caches = {"verify": state.cache, "step": state.draft.cache}  # one of each, whatever the number of rows

    def run(case: tuple[str, int]) -> None:
        what, _ = case
        if what == "plain":
            carries[case], outcome = speculate(alone.models, PLAIN, alone.weights, carries[case])
        else:
            program, carry = verify if what == "verify" else draft_step, carries[case]._replace(cache=caches[what])
            carry, outcome = program(models, weights, carry)
            caches[what], carries[case] = carry.cache, carry._replace(cache=())
        jax.block_until_ready(outcome)

    costs = compare_each(run, list(carries))  # the first one is a plain round
    return Parts(
        {strategy: costs["verify", count] for strategy, count in rows.items()},
        {strategy: costs["step", count] for strategy, count in beams.items()},
        step_bytes(weights) / target_bytes(target, weights),
    )


def step_bytes(weights: Weights) -> int:
    """Bytes of weights that a draft step must read; the embedding is looked up, fc is of the target's features."""
    return _bytes({name: part for name, part in weights.draft.items() if name not in ("embed_tokens", "fc")})


def target_bytes(target: Target, weights: Weights) -> int:
    """Bytes of weights that a forward pass of the target must read (of experts: if all of them are used)."""
    looked_up = 0 if target.config.tie_embeddings else _bytes(weights.target["model"]["embed_tokens"])
    return _bytes(weights.target) - looked_up


def _bytes(params) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(params))

"""Plain against speculative decoding, measured on the same prompts in one run.

Strategies take turns prompt by prompt, so that a machine that speeds up or slows down does so for all of them; a first
pass over prompts of every compiled shape is not counted. Times cover prefill and all rounds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.generate import Result, cache_entries, generate, padded_length
from eagle3_jax.speculate.strategy import parse_strategy


@dataclass
class Tally:
    """What one strategy did over all prompts."""

    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(r.tokens) for r in self.results)

    @property
    def tau(self) -> float:
        accepted = [a for r in self.results for a in r.accepted]
        return 1.0 + (sum(accepted) / len(accepted) if accepted else 0.0)

    def acceptance_by_depth(self, depth: int) -> list[float]:
        """Share of rounds that accepted at least d draft tokens, d = 1..depth."""
        accepted = [a for r in self.results for a in r.accepted]
        return [round(sum(a >= d for a in accepted) / max(len(accepted), 1), 4) for d in range(1, depth + 1)]


def measure(
    target: Target,
    draft: Draft,
    prompts: list[list[int]],
    strategies: list[str],
    max_new_tokens: int,
    batch: int = 1,
    done: Callable[[int, int], None] = lambda finished, total: None,
    temperature: float = 0.0,
) -> dict[str, Tally]:
    """Generates with every strategy from `batch` prompts at a time, all by the same seed.

    Prompts beyond the last full group are left out: a smaller batch would count as one of this size. Raises UserError
    if there is no full group.
    """
    settings = {"temperature": temperature, "seed": 0}
    if len(prompts) < batch:
        raise UserError(f"a batch of {batch} needs as many prompts, there are {len(prompts)} / give more prompts")
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    tallies = {strategy: Tally() for strategy in strategies}
    for strategy in strategies:
        for group in {_shape(target, group, strategy, max_new_tokens): group for group in groups}.values():
            # Without stops, which are no part of a program: an answer of one token would leave the round uncompiled.
            generate(target, draft, group, max_new_tokens, strategy, stop_token_ids=(), **settings)
    for finished, group in enumerate(groups, start=1):
        for strategy in strategies:
            begin = time.perf_counter()
            tallies[strategy].results += generate(target, draft, group, max_new_tokens, strategy, **settings)
            tallies[strategy].seconds += time.perf_counter() - begin
        done(finished, len(groups))
    return tallies


def _shape(target: Target, group: list[list[int]], strategy: str, max_new_tokens: int) -> tuple[int, int]:
    """What decides which compiled programs of a strategy a group needs: lengths of padded prompts and of caches."""
    entries = cache_entries(target, group, [max_new_tokens] * len(group), parse_strategy(strategy))
    return padded_length(max(map(len, group))), entries


def row(strategy: str, batch: int, tally: Tally, plain: Tally) -> dict:
    """One row of `eagle3 bench` (api.md)."""
    return {
        "strategy": strategy,
        "batch": batch,
        "prompts": len(tally.results),
        "tok_s": round(tally.tokens / tally.seconds, 2),
        "ms_per_token": round(1000 * tally.seconds / tally.tokens, 2),
        "tau": round(tally.tau, 4),
        "acceptance_by_depth": tally.acceptance_by_depth(parse_strategy(strategy).depth),
        "speedup_vs_plain": round((tally.tokens / tally.seconds) / (plain.tokens / plain.seconds), 4),
        "identical_to_plain": identical_share(tally, plain),
    }


def identical_share(tally: Tally, plain: Tally) -> float:
    """Share of prompts whose tokens are those of plain decoding."""
    same = [a.tokens == b.tokens for a, b in zip(tally.results, plain.results, strict=True)]
    return round(sum(same) / len(same), 4)


def parting_gaps(target: Target, prompts: list[list[int]], tally: Tally, plain: Tally) -> list[float]:
    """For each prompt where a strategy leaves plain decoding: the target's top-2 logit gap at that place.

    In bf16 a block of several tokens and single tokens round differently; a gap near zero shows a tie, not a fault.
    """
    gaps = []
    for prompt, a, b in zip(prompts, tally.results, plain.results, strict=False):
        differing = [i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y]
        if differing:
            logits = target.forward([prompt + b.tokens[: differing[0]]]).logits[0, -1]
            top = np.sort(np.asarray(jax.device_get(logits)))[-2:]
            gaps.append(round(float(top[1] - top[0]), 4))
    return gaps

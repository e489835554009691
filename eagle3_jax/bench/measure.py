"""Plain against speculative decoding, measured on the same prompts in one run.

Strategies take turns prompt by prompt, so that a machine that speeds up or slows down does so for all of them; what
they need is compiled before. Times cover prefill and all rounds.

`oracle:K` is chain:K whose proposals are plain decoding's answer: the most that the costs of a pair allow.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from eagle3_jax.bench.parts import Parts
from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.acceptance import acceptance_by_depth, tau
from eagle3_jax.speculate.generate import Result, cache_entries, generate, padded_length, strategies_of, warm_up
from eagle3_jax.speculate.request import SamplingParams
from eagle3_jax.speculate.strategy import Strategy, parse_strategy

_FORESEEING = 6  # times that an oracle tries its text, at most


@dataclass
class Tally:
    """What one strategy did over all prompts."""

    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(r.tokens) for r in self.results)

    @property
    def accepted(self) -> list[int]:
        """Draft tokens accepted in each round of each request."""
        return [accepted for r in self.results for accepted in r.accepted]

    @property
    def tau(self) -> float:
        return tau(sum(self.accepted), len(self.accepted))

    @property
    def depth(self) -> int:
        """Of the deepest strategy that ran."""
        return max((strategy.depth for strategy in self.shares()), default=0)

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second of one request while it has rounds: without prefill and its token."""
        return sum(len(r.tokens) - 1 for r in self.results) / sum(r.seconds for r in self.results)

    @property
    def host_share(self) -> float:
        """Of the time of all rounds, the share in which the host did not just wait for a compiled one."""
        waited, seconds = (sum(getattr(r, name) for r in self.results) for name in ("waited", "seconds"))
        return 1 - waited / seconds if self.accepted else 0.0

    def shares(self) -> dict[Strategy, float]:
        """Of all rounds, how many were of which strategy."""
        counts = Counter(s for r in self.results for s in r.strategies)
        return {parse_strategy(strategy): count / counts.total() for strategy, count in counts.most_common()}


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
    """Generates with every strategy from `batch` prompts at a time, all by the same seed; "plain" is one of them.

    Prompts beyond the last full group are left out: a smaller batch would count as one of this size. Raises UserError
    if there is no full group.
    """
    sampling = SamplingParams(max_new_tokens, temperature, seed=0)
    if len(prompts) < batch:
        raise UserError(f"a batch of {batch} needs as many prompts, there are {len(prompts)} / give more prompts")
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    in_turn = sorted(strategies, key=lambda name: name != "plain")  # an oracle tells what plain decoding said
    tallies = {strategy: Tally() for strategy in strategies}
    for name in in_turn:
        for group in {_shape(target, draft, group, name, max_new_tokens): group for group in groups}.values():
            warm_up(target, draft, group, as_strategy(name), sampling, group if is_oracle(name) else None)
    for finished, group in enumerate(groups, start=1):
        for name in in_turn:
            run = functools.partial(generate, target, draft, group, strategy=as_strategy(name), sampling=sampling)
            if is_oracle(name):
                run = functools.partial(run, oracle=_foreseen(run, tallies["plain"].results[-batch:]))
            begin = time.perf_counter()
            tallies[name].results += run()
            tallies[name].seconds += time.perf_counter() - begin
        done(finished, len(groups))
    return tallies


def _foreseen(run: Callable[..., list[Result]], plain: list[Result]) -> list[list[int]]:
    """What an oracle must tell. In bf16 a block of tokens and single ones round differently, so that its text may leave
    plain decoding's at a near tie; then it is told its own text, a few times over."""
    answers = [r.tokens for r in plain]
    for _ in range(_FORESEEING):
        told, answers = answers, [r.tokens for r in run(oracle=answers)]
        if told == answers:
            break
    return answers


def is_oracle(name: str) -> bool:
    return name.startswith("oracle:")


def as_strategy(name: str) -> str:
    """What `generate` is given for a strategy of the benchmark."""
    return name.replace("oracle:", "chain:", 1) if is_oracle(name) else name


def _shape(target: Target, draft: Draft, group: list[list[int]], name: str, max_new_tokens: int) -> tuple[int, int]:
    """What decides which compiled programs of a strategy a group needs: lengths of padded prompts and of caches."""
    entries = cache_entries(target, group, [max_new_tokens] * len(group), *strategies_of(as_strategy(name), draft))
    return padded_length(max(map(len, group))), entries


def row(strategy: str, batch: int, tally: Tally, plain: Tally, parts: Parts | None = None) -> dict:
    """One row of `eagle3 bench` (api.md).

    host_share: see `Tally`. With parts, of strategies that draft: v and d (see `bench.parts`; where all rounds were
    alike) and the least d that its bytes allow, the bound on the speed-up of decoding that follows, that speed-up
    (prefill left out), and what share of the bound it is.
    """
    cells = {
        "strategy": strategy,
        "batch": batch,
        "tok_s": round(tally.tokens / tally.seconds, 2),
        "ms_per_token": round(1000 * tally.seconds / tally.tokens, 2),
        "tau": round(tally.tau, 4),
        "acceptance_by_depth": acceptance_by_depth(tally.accepted, tally.depth),
        "speedup_vs_plain": round((tally.tokens / tally.seconds) / (plain.tokens / plain.seconds), 4),
        "identical_to_plain": identical_share(tally, plain),
        "host_share": round(tally.host_share, 4),
    }
    if parts is None or not tally.depth:
        return cells
    shares = tally.shares()
    if len(shares) == 1:
        v, d = parts.verification[next(iter(shares))], parts.step[next(iter(shares))]
        cells |= {"v": round(v, 4), "d": round(d, 4), "d_floor": round(parts.step_floor, 4)}
    bound = parts.bound(shares, tally.tau)
    speedup = tally.decode_tok_s / plain.decode_tok_s
    cells |= {"bound": round(bound, 4), "decode_speedup": round(speedup, 4)}
    return cells | {"of_bound": round(speedup / bound, 4)}


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

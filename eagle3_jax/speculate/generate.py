"""`generate`: prompts in, tokens out, plain or speculative; a host loop around the compiled round."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.acceptance import tau
from eagle3_jax.speculate.controller import Controller, menu, trained_acceptance, worthwhile
from eagle3_jax.speculate.cost import Costs, cost_key, known_costs, measure_rounds
from eagle3_jax.speculate.request import (
    SamplingParams,
    check_params,
    check_prompt,
    cut,
    device_sampling,
    spread,
    token_ids,
)
from eagle3_jax.speculate.round import (
    UNREAD,
    Committed,
    Models,
    State,
    Weights,
    cache_room,
    must_catch_up,
    next_round,
    prefill,
    programs,
)
from eagle3_jax.speculate.round_costs import RoundCosts
from eagle3_jax.speculate.strategy import Strategy, parse_strategy, with_sampled_drafts


@dataclass
class Result:
    """One request. accepted[i]: draft tokens accepted in round i, before trimming at a stop; drafts[i]: the proposed
    target ids of round i, for a tree those on its best path: the accepted ones and the likeliest below them. The first
    token comes from prefill and belongs to no round. nonfinite_rounds: rounds in which the draft's logits held NaN or
    infinities, which costs acceptance and nothing else. strategies[i]: of round i, as text. seconds: of all rounds of
    the batch; waited: of these, those in which the host had nothing to do but wait for an outcome."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    nonfinite_rounds: int = 0
    strategies: list[str] = field(default_factory=list)
    seconds: float = field(default=0.0, compare=False)
    waited: float = field(default=0.0, compare=False)

    @property
    def tau(self) -> float:
        """Over all rounds, untrimmed."""
        return tau(sum(self.accepted), len(self.accepted))


def generate(
    target: Target,
    draft: Draft | None,
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    strategy: str | Sequence[Sequence[int]] = "plain",
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    *,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    min_tokens: int = 0,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    sample_draft: bool = False,
    oracle: Sequence[Sequence[int]] | None = None,
) -> Result | list[Result]:
    """Generates from one prompt (list of ids) or several (list of lists, run as one ragged batch).

    strategy: "plain", "chain:K", "tree:DxKxN", a list of paths (see `strategy`), or "auto": another one each round, by
    what was accepted lately and by what rounds cost here (see `controller`), which the first use measures.
    temperature 0 is greedy; seed makes sampling repeatable, request i of a batch uses seed + i. stop_token_ids: None =
    the target's end tokens, () = never stop. on_tokens(i, new): called as tokens of request i are committed.
    finish_reason is "stop" or "length" (max_new_tokens or the context limit). For the other settings see
    `SamplingParams`.

    sampling: all settings at once, one set or one for each prompt, in place of the single keywords.
    sample_draft: draft tokens are drawn from the draft's distribution and verified by the p/q rule; by default they are
    its likeliest ones. Both leave the target's distribution as it is; only the latter keeps the text of a seed as well.
    oracle: for measuring, with chains: known answers, one for each prompt. The draft works as ever, but their tokens
    are proposed in place of its own, so that all are accepted where the target would say the same.

    The draft may be used beyond its own context window: positions are computed, not looked up, so that its tokens may
    be accepted less often there, and nothing else. Raises UserError on an impossible request.
    """
    single = len(prompt_ids) > 0 and np.ndim(prompt_ids[0]) == 0
    prompts = [token_ids(prompt) for prompt in ([prompt_ids] if single else prompt_ids)]
    if not prompts:
        raise UserError("no prompt was given / pass at least one list of token ids")
    keywords = SamplingParams(
        *(max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty),
        *(logit_bias, min_tokens, seed, stop_token_ids),
    )
    if sampling is not None and keywords != SamplingParams():
        raise UserError("sampling= was given and single settings as well / put all of them into sampling=")
    params = spread(keywords if sampling is None else sampling, len(prompts))
    for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        check_prompt(i, prompt, target)
        check_params(wanted, target.config.vocab_size)
    strategies = strategies_of(strategy, draft)
    if sample_draft and not all(p.is_greedy for p in params):
        strategies = [with_sampled_drafts(shape) if shape.depth else shape for shape in strategies]
    stops = [p.stops(target) for p in params]
    limits = _limits(target, prompts, params)
    results = [Result() for _ in prompts]

    models, weights, state, first = begin(target, draft, prompts, params, strategies)
    if oracle is not None:
        state = _with_oracle(models, state, prompts, oracle, strategies)
    for i, token in enumerate(np.asarray(first)):
        _commit(results, i, [int(token)], limits, stops, on_tokens)
    depth = max(shape.depth for shape in strategies)
    controller = Controller(depth, trained_acceptance(draft)) if len(strategies) > 1 else None
    costs = None
    if controller is not None and any(r.finish_reason is None for r in results):
        kept, state = _costs(target, draft, models, weights, strategies, state)
        costs = RoundCosts(kept)

    def choose() -> Strategy:
        return strategies[0] if controller is None else controller.next(costs)

    rounds = _rounds(models, weights, state, choose, ahead=jax.default_backend() != "cpu")
    begun, waited = time.perf_counter(), 0.0
    while any(r.finish_reason is None for r in results):
        shape, (tokens, accepted, drafts, finite), waiting, seconds = next(rounds)
        waited += waiting
        running = [i for i, result in enumerate(results) if result.finish_reason is None]
        if controller is not None:
            controller.observe(shape, accepted[running].tolist())
            costs.ran(shape, seconds)
        for i in running:
            results[i].nonfinite_rounds += int(not finite[i])
            results[i].strategies.append(shape.text)
            results[i].accepted.append(int(accepted[i]))
            results[i].drafts.append([token for token in drafts[i].tolist() if token >= 0])
            _commit(results, i, tokens[i, : accepted[i] + 1].tolist(), limits, stops, on_tokens)
    for result in results:
        result.seconds, result.waited = time.perf_counter() - begun, waited
    return results[0] if single else results


def warm_up(
    target: Target,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    strategy: str | Sequence[Sequence[int]],
    sampling: SamplingParams,
    oracle: Sequence[Sequence[int]] | None = None,
) -> None:
    """Compiles all that `generate` needs for such prompts with these settings, and runs each program once."""
    strategies, params = strategies_of(strategy, draft), spread(sampling, len(prompts))
    models, weights, state, _ = begin(target, draft, prompts, params, strategies)
    if oracle is not None:
        state = _with_oracle(models, state, prompts, oracle, strategies)
    if len(strategies) > 1:
        strategies, state = _costs(target, draft, models, weights, strategies, state)
    unread = 0
    for shape in strategies:
        state, committed, unread = next_round(models, shape, weights, state, unread)
        jax.block_until_ready(committed)


class Begun(NamedTuple):
    """A batch whose prompts have been read. first: int32 [B], the first new token of each."""

    models: Models
    weights: Weights
    state: State
    first: jax.Array


def begin(
    target: Target, draft: Draft | None, prompts, params: Sequence[SamplingParams], strategies: Sequence[Strategy]
) -> Begun:
    """Reads the prompts of a batch whose rounds will be of these strategies."""
    models, weights = pair(target, draft if any(shape.depth for shape in strategies) else None)
    ids, lengths = pad_prompts(prompts)
    limits = _limits(target, prompts, params)
    entries = cache_entries(target, prompts, limits, *strategies)
    sampling, reach = device_sampling(target, prompts, params), reach_of(target, prompts, limits)
    state, first = prefill(models, entries, weights, ids, lengths, sampling, reach)
    return Begun(models, weights, state, first)


def _limits(target: Target, prompts, params: Sequence[SamplingParams]) -> list[int]:
    """The most new tokens of each request."""
    window = target.config.max_positions
    return [int(min(p.max_new_tokens, window - len(prompt))) for p, prompt in zip(params, prompts, strict=True)]


def reach_of(target: Target, prompts, limits: Sequence[int]) -> jax.Array | None:
    """`State.reach` of prompts with at most so many new tokens each."""
    if target.config.rope_border is None:
        return None
    return jnp.asarray([len(prompt) + new for prompt, new in zip(prompts, limits, strict=True)], jnp.int32)


def _with_oracle(
    models: Models, state: State, prompts, answers: Sequence[Sequence[int]], strategies: list[Strategy]
) -> State:
    if len(answers) != len(prompts) or not all(shape.is_chain and shape.depth for shape in strategies):
        raise UserError("an oracle proposes known answers / give one for each prompt, and a chain as strategy")
    known = np.full((len(prompts), state.cache[0].k.shape[2]), -1, np.int32)
    for row, prompt, answer in zip(known, prompts, answers, strict=True):
        text = [*prompt, *answer][: len(row)]
        row[: len(text)] = text
    return state._replace(draft=state.draft._replace(oracle=models.placement.everywhere(jnp.asarray(known))))


class Ran(NamedTuple):
    """A round whose outcome is there. waited: seconds that the host waited for it. seconds: that the device took, from
    when the round was dispatched, or the one before it was there if that was later; None where it did more in them, a
    new program was compiled or the draft caught up."""

    strategy: Strategy
    outcome: Committed
    waited: float
    seconds: float | None


def _rounds(
    models: Models, weights: Weights, state: State, choose: Callable[[], Strategy], ahead: bool
) -> Iterator[Ran]:
    """One round after the other, without end.

    ahead: the next round is dispatched before an outcome is fetched, so that an accelerator need not wait for the host.
    Whoever stops asking leaves one round unused.
    """
    dispatched: deque[tuple[Strategy, Committed, bool, float]] = deque()
    unread, there, known = 0, 0.0, programs()
    while True:
        strategy, begun = choose(), time.perf_counter()
        alone = state.draft is None or not must_catch_up(strategy, unread)
        state, committed, unread = next_round(models, strategy, weights, state, unread)
        dispatched.append((strategy, committed, alone, begun))
        if len(dispatched) > ahead:
            (strategy, committed, alone, begun), begin = dispatched.popleft(), time.perf_counter()
            outcome, before = jax.device_get(committed), there
            there, alone, known = time.perf_counter(), alone and known == programs(), programs()
            yield Ran(strategy, outcome, there - begin, there - max(begun, before) if alone else None)


def _costs(
    target: Target, draft: Draft, models: Models, weights: Weights, strategies: Sequence[Strategy], state: State
):
    """What a round costs in batches like `state`, of each strategy that is worth having there, and the state, which may
    have been used to measure."""
    used = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.sampling)]
    drafts = ["sampled drafts"] if any(strategy.sampled for strategy in strategies) else []
    key = cost_key(target, draft, state.pending.shape[0], used + drafts)

    def measure(shapes: list[Strategy]) -> Costs:
        nonlocal state
        measured, state = measure_rounds(models, weights, shapes, state)
        return measured

    return worthwhile(known_costs(key, state.cache[0].k.shape[2], strategies, measure)), state


def strategies_of(strategy: str | Sequence[Sequence[int]], draft: Draft | None) -> list[Strategy]:
    """The strategies that rounds may have: one, or several for "auto"."""
    is_auto = isinstance(strategy, str) and strategy == "auto"
    shapes = [] if is_auto else [parse_strategy(strategy)]
    if draft is None and (is_auto or shapes[0].depth):
        raise UserError(f"strategy {strategy} needs a draft / pass a draft or use plain")
    if is_auto:
        return menu(draft)
    if shapes[0].depth and shapes[0].top_k > draft.config.draft_vocab_size:
        raise UserError(
            f"strategy {strategy} wants the {shapes[0].top_k} likeliest tokens, the draft's vocabulary has "
            f"{draft.config.draft_vocab_size} / lower K"
        )
    return shapes


def pair(target: Target, draft: Draft | None) -> tuple[Models, Weights]:
    """The static and the array half of a target with its draft (checked against it and bound), for the round."""
    if draft is None:
        return Models(target.graph, None, None, target.placement), Weights(target.params, None, None)
    draft, placement = draft.bind(target), target.placement
    weights = Weights(target.params, draft.params, placement.everywhere(jnp.asarray(draft.d2t)))
    return Models(target.graph, draft.graph, draft.taps, placement), weights


def window_warning(draft: Draft, target: Target) -> str | None:
    """One line when the draft was made for shorter texts than the target allows, else None."""
    own, window = draft.config.decoder.max_positions, target.config.max_positions
    if own >= window:
        return None
    return f"note: the draft was made for {own} positions, the target for {window}; beyond {own} it may be right less"


def nonfinite_warning(results: Sequence[Result]) -> str | None:
    """One line when a draft's logits held NaN or infinities in some rounds, else None."""
    rounds, broken = sum(len(r.accepted) for r in results), sum(r.nonfinite_rounds for r in results)
    if not broken:
        return None
    return (
        f"note: the draft's logits were not finite in {broken} of {rounds} rounds; the text is the target's all the "
        f"same, but the draft is damaged, or its dtype is too narrow"
    )


def pad_prompts(prompts: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    """int32 [B, P] padded on the right to `padded_length` (so that few shapes are compiled), and lengths [B]."""
    ids = np.zeros((len(prompts), padded_length(max(map(len, prompts)))), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(ids), jnp.asarray([len(p) for p in prompts], jnp.int32)


def padded_length(tokens: int) -> int:
    """The length to which prompts of at most `tokens` are padded: a power of two from 32 on."""
    return _power_of_two(tokens, 32)


def cache_entries(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], *strategies: Strategy
) -> int:
    """Length of the caches for prompts with at most so many new tokens each: a power of two from 128 on that holds the
    text, but no more than the target's context takes, and room for a round: the same for all strategies of few nodes,
    so that none has a longer cache to read. With `padded_length` it decides which programs a batch needs."""
    window, room = target.config.max_positions, max(cache_room(strategy, len(prompts)) for strategy in strategies)
    longest = max(min(len(p) + new, window) for p, new in zip(prompts, max_new_tokens, strict=True))
    text = max(min(_power_of_two(longest, 128), round_up(window, 128)), padded_length(max(map(len, prompts))))
    return text + round_up(max(room, UNREAD), 16)


def _power_of_two(value: int, least: int) -> int:
    return max(least, 1 << (value - 1).bit_length())


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _commit(results, i, new, limits, stops, on_tokens) -> None:
    """Appends tokens up to the first stop token or the limit, wherever in the block it lies."""
    kept, results[i].finish_reason = cut(new, limits[i] - len(results[i].tokens), stops[i])
    results[i].tokens += kept
    if on_tokens is not None:
        on_tokens(i, kept)

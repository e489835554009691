"""`generate`: prompts in, tokens out, plain or speculative; a host loop around the compiled round."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.round import Models, Weights, prefill, rows_needed, speculate
from eagle3_jax.speculate.sampling import Sampling

_MAX_DEPTH = 32


@dataclass
class Result:
    """One request. accepted[i]: draft tokens accepted in round i, before trimming at a stop; drafts[i]: the proposed
    target ids of round i. The first token comes from prefill and belongs to no round."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean tokens committed per target verification: 1 + accepted / rounds (spec 7.4)."""
        return 1.0 + (sum(self.accepted) / len(self.accepted) if self.accepted else 0.0)


def parse_strategy(strategy: str) -> int:
    """Draft tokens a round: 0 for "plain", K for "chain:K". Raises UserError for anything else."""
    if strategy == "plain":
        return 0
    kind, _, number = strategy.partition(":")
    if kind == "chain" and number.isdigit() and 1 <= int(number) <= _MAX_DEPTH:
        return int(number)
    raise UserError(f"strategy {strategy!r} is not known / use plain or chain:K with K from 1 to {_MAX_DEPTH}")


def generate(
    target: Target,
    draft: Draft | None,
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    strategy: str = "plain",
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Result | list[Result]:
    """Generates from one prompt (list of ids) or several (list of lists, run as one ragged batch).

    strategy: "plain" or "chain:K". temperature 0 is greedy; seed makes sampling repeatable, request i of a batch uses
    seed + i. stop_token_ids: None = the target's end tokens, () = never stop. on_tokens(i, new): called as tokens of
    request i are committed. finish_reason is "stop" or "length" (max_new_tokens or the context limit).
    Raises UserError on an impossible request.
    """
    single = len(prompt_ids) > 0 and not isinstance(prompt_ids[0], (Sequence, np.ndarray))
    prompts = [list(map(int, p)) for p in ([prompt_ids] if single else prompt_ids)]
    _check_request(target, prompts, max_new_tokens, temperature, top_p, top_k)
    depth = parse_strategy(strategy)
    if depth and draft is None:
        raise UserError(f"strategy {strategy} needs a draft / pass a draft or use plain")
    models, weights = pair(target, draft if depth else None)
    stop = frozenset(target.eos_token_ids if stop_token_ids is None else stop_token_ids)
    seed = secrets.randbits(31) if seed is None else seed
    sampling = sampling_for([seed + i for i in range(len(prompts))], temperature, top_p, top_k)
    limits = [min(max_new_tokens, target.config.max_positions - len(p)) for p in prompts]
    results = [Result() for _ in prompts]

    ids, lengths = pad_prompts(prompts)
    cache_length = round_up(ids.shape[1] + max(limits) + rows_needed(depth, len(prompts)) + 1, 128)
    state, first = prefill(models, cache_length, depth, weights, ids, lengths, sampling)
    for i, token in enumerate(np.asarray(first)):
        _commit(results, i, [int(token)], limits, stop, on_tokens)
    while any(r.finish_reason is None for r in results):
        state, committed = speculate(models, depth, weights, state)
        tokens, accepted, drafts = jax.device_get(committed)
        for i, result in enumerate(results):
            if result.finish_reason is None:
                result.accepted.append(int(accepted[i]))
                result.drafts.append(drafts[i].tolist())
                _commit(results, i, tokens[i, : accepted[i] + 1].tolist(), limits, stop, on_tokens)
    return results[0] if single else results


def pair(target: Target, draft: Draft | None) -> tuple[Models, Weights]:
    """The static and the array half of a target with its draft (checked against it and bound), for the round."""
    if draft is None:
        return Models(target.graph, None, None), Weights(target.params, None, None)
    draft = draft.bind(target)
    return Models(target.graph, draft.graph, draft.taps), Weights(target.params, draft.params, jnp.asarray(draft.d2t))


def pad_prompts(prompts: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    """int32 [B, P] padded on the right to a multiple of 32 (so that few shapes are compiled), and lengths [B]."""
    ids = np.zeros((len(prompts), round_up(max(map(len, prompts)), 32)), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(ids), jnp.asarray([len(p) for p in prompts], jnp.int32)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _commit(results, i, new, limits, stop, on_tokens) -> None:
    """Appends tokens up to the first stop token or the limit, wherever in the block it lies."""
    result, kept = results[i], []
    for token in new:
        kept.append(token)
        if token in stop:
            result.finish_reason = "stop"
        elif len(result.tokens) + len(kept) >= limits[i]:
            result.finish_reason = "length"
        if result.finish_reason is not None:
            break
    result.tokens += kept
    if on_tokens is not None:
        on_tokens(i, kept)


def sampling_for(seeds: Sequence[int], temperature: float, top_p: float, top_k: int) -> Sampling | None:
    """Sampling state of one request a seed; None (greedy) at temperature 0, and where logits would overflow float32."""
    if temperature < 1e-5:
        return None
    keys = jax.vmap(jax.random.key)(jnp.asarray([seed % 2**32 for seed in seeds], jnp.uint32))
    batch = len(seeds)
    return Sampling(keys, jnp.full(batch, temperature), jnp.full(batch, top_p), jnp.full(batch, top_k))


def _check_request(target: Target, prompts, max_new_tokens, temperature, top_p, top_k) -> None:
    if not prompts:
        raise UserError("no prompt was given / pass at least one list of token ids")
    window, vocabulary = target.config.max_positions, target.config.vocab_size
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {i} is empty / give at least one token")
        if len(prompt) >= window:
            raise UserError(f"prompt {i} has {len(prompt)} tokens, the target's context is {window} / shorten it")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise UserError(f"prompt {i} has token ids outside 0..{vocabulary - 1} / use the target's own tokenizer")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens} / it must be at least 1")
    if not (temperature >= 0 and 0 < top_p <= 1 and top_k >= 0):
        raise UserError(
            f"sampling settings temperature {temperature}, top_p {top_p}, top_k {top_k} / "
            "temperature must be >= 0, top_p in (0, 1], top_k >= 0"
        )

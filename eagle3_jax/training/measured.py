"""At the end of a run: real generation with the trained draft, its tau beside the simulated one of the same answers."""

from typing import Any

import numpy as np

from eagle3_jax.config import EvaluationConfig
from eagle3_jax.data.packing import Packed
from eagle3_jax.data.records import read_prompts
from eagle3_jax.data.template import prompt_ids
from eagle3_jax.draft.draft import Draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.acceptance import tau
from eagle3_jax.speculate.generate import generate, strategies_of
from eagle3_jax.speculate.strategy import parse_strategy
from eagle3_jax.training.evaluate import simulate


def measure_generation(
    config: EvaluationConfig, target: Target, draft: Draft, prompts: list[list[int]], say
) -> dict[str, Any] | None:
    """tau of `evaluation_prompts`, greedily answered, and simulated tau of the answers; None for no prompts."""
    if not prompts:
        return None
    say(f"generating with the draft: {len(prompts)} prompts, {config.strategy}")
    results = generate(target, draft, prompts, config.max_new_tokens, config.strategy)
    rounds = [accepted for result in results for accepted in result.accepted]
    if not rounds:
        return None
    documents = [
        (np.asarray(p + r.tokens, np.int32), np.arange(len(p) + len(r.tokens)) >= len(p))
        for p, r in zip(prompts, results, strict=True)
    ]
    length = max(len(ids) for ids, _ in documents)
    simulated = simulate(target, draft, documents, parse_strategy(config.strategy).depth, max(length, 2)).summary()
    return {
        "strategy": config.strategy,
        "prompts": len(prompts),
        "tokens": sum(len(result.tokens) for result in results),
        "tau": round(tau(sum(rounds), len(rounds)), 5),
        "simulated_tau": round(simulated["simulated_tau"], 5),
    }


def evaluation_prompts(
    config: EvaluationConfig, target: Target, draft: Draft, heldout: Packed, template: dict[str, Any]
) -> list[list[int]]:
    """Token ids of the first `config.count` prompts of the file, as a server would send them, or of what precedes the
    first answers of held-out rows; those that leave no room for an answer are left out.

    Read before training, so that a mistake is not found after it. Raises UserError for a file that cannot be read or
    has no prompt with room, and for a strategy that is none or too wide for the draft.
    """
    if not config.count:
        return []
    strategies_of(config.strategy, draft)
    room = target.config.max_positions - config.max_new_tokens
    if config.prompts is None:
        found = _before_answers(heldout)
    else:
        chats = [[{"role": "user", "content": turns[0]}] for turns in read_prompts(config.prompts)]
        tokenizer = target.require_tokenizer()
        found = [list(map(int, prompt_ids(tokenizer, chat, template=template))) for chat in chats[: config.count]]
    fitting = [prompt for prompt in found if 0 < len(prompt) <= room][: config.count]
    if config.prompts is not None and not fitting:
        raise UserError(
            f"no prompt of the first {config.count} is at most {room} tokens long, which leaves room for "
            f"evaluation.max_new_tokens in the target's {target.config.max_positions} / {config.prompts} / lower it"
        )
    return fitting


def _before_answers(heldout: Packed) -> list[list[int]]:
    found = []
    for row, members in enumerate(heldout.members):
        for number in range(len(members)):
            inside = heldout.document_ids[row] == number
            supervised = np.flatnonzero(heldout.loss_mask[row, inside])
            found.append(heldout.input_ids[row, inside][: supervised[0]].tolist())
    return found

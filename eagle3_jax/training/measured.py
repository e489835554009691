"""At the end of a run: real generation with the trained draft, its tau beside the simulated one of the same answers."""

from typing import Any

import numpy as np

from eagle3_jax.config import EvaluationConfig
from eagle3_jax.data.packing import Packed
from eagle3_jax.data.records import read_prompts
from eagle3_jax.data.template import prompt_ids
from eagle3_jax.draft.draft import Draft
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.acceptance import tau
from eagle3_jax.speculate.generate import generate
from eagle3_jax.speculate.strategy import parse_strategy
from eagle3_jax.training.evaluate import simulate


def measure_generation(
    config: EvaluationConfig, target: Target, draft: Draft, heldout: Packed, template: dict[str, Any], say
) -> dict[str, Any] | None:
    """tau of `config.count` prompts, greedily answered, and simulated tau of the answers; None for no prompts.

    Prompts are those of the file, as a server would send them, or what precedes the first answers of held-out rows.
    """
    room = target.config.max_positions - config.max_new_tokens
    prompts = [p for p in _prompts(config, target, heldout, template) if 0 < len(p) <= room][: config.count]
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


def _prompts(config: EvaluationConfig, target: Target, heldout: Packed, template: dict[str, Any]) -> list[list[int]]:
    if config.prompts is not None:
        turns = read_prompts(config.prompts)[: config.count]
        chats = ([{"role": "user", "content": turn[0]}] for turn in turns)
        return [list(map(int, prompt_ids(target.require_tokenizer(), chat, template=template))) for chat in chats]
    found = []
    for row, members in enumerate(heldout.members):
        for number in range(len(members)):
            inside = heldout.document_ids[row] == number
            supervised = np.flatnonzero(heldout.loss_mask[row, inside])
            found.append(heldout.input_ids[row, inside][: supervised[0]].tolist())
    return found

"""`make demo`: the whole job on a real model, SmolLM2-135M-Instruct, in one command and a quarter of an hour.

    answers    a few prompts are answered live; the bulk was written beforehand by `eagle3 data generate` and is bundled
    train      configs/demo.yaml: a draft for the target, to runs/demo/export
    measure    plain against chain speculation on held-out prompts, interleaved; the same in float32 for identity

Every stage is resumable: a second call goes on, or shows the finished result at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle3_jax.bench.measure import identical_share, measure, parting_gaps, row
from eagle3_jax.config import Config
from eagle3_jax.data.records import read_prompts
from eagle3_jax.data.template import prompt_ids
from eagle3_jax.draft.draft import load_draft
from eagle3_jax.machine import describe_machine
from eagle3_jax.models.target import Target, load_target
from eagle3_jax.speculate.generate import generate
from eagle3_jax.speculate.strategy import parse_strategy
from eagle3_jax.training.evaluate import simulate
from eagle3_jax.training.run_folder import read_result, write_json
from eagle3_jax.training.trainer import train

STRATEGIES = ("chain:1", "chain:2")


@dataclass(frozen=True)
class DemoSize:
    """prompts: held-out prompts measured; tokens: new tokens each; identity_tokens: new tokens each in float32."""

    prompts: int = 8
    tokens: int = 80
    identity_tokens: int = 40


def run_demo(config: Config, size: DemoSize, progress: Callable, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs all stages and returns result.json's content; a finished result is returned as it is."""
    stored = config.run_dir / "result.json"
    if stored.exists() and "speedup" in (result := read_result(config.run_dir)):
        say(f"already done: {stored}; remove {config.run_dir} to run again")
        return result
    target = load_target(config.target.path, config.target.dtype, quantize=config.target.quantize)
    prompts = heldout_prompts(target, size.prompts)
    live = generate(target, None, prompts[:2], 32)
    for prompt, answer in zip(prompts[:2], live, strict=True):
        say(f"live answer to {len(prompt)} prompt tokens: {target.tokenizer.decode(answer.tokens)!r}")
    result = train(config, resume=True, target=target, progress=progress, say=say)
    result |= _measure(target, config, prompts, size, say)
    write_json(stored, result)
    return result


def heldout_prompts(target: Target, count: int) -> list[list[int]]:
    """Token ids of `count` bundled held-out prompts, as a server would feed them.

    The last ones of the file, since training evaluates on answers to the first; those of 33 to 64 tokens, so
    that one prompt shape is compiled.
    """
    file = resources.files("eagle3_jax.bench") / "demo_prompts" / "heldout.jsonl"
    turns = reversed(read_prompts(Path(str(file))))
    ids = (list(map(int, prompt_ids(target.tokenizer, [{"role": "user", "content": t[0]}]))) for t in turns)
    return [prompt for prompt in ids if 32 < len(prompt) <= 64][:count]


def _measure(target: Target, config: Config, prompts, size: DemoSize, say) -> dict[str, Any]:
    draft = load_draft(config.run_dir / "export", target=target)
    say(f"measuring plain and {', '.join(STRATEGIES)} on {len(prompts)} held-out prompts, taking turns")
    tallies = measure(target, draft, prompts, ["plain", *STRATEGIES], size.tokens)
    plain = tallies["plain"]
    rows = [row(strategy, 1, tally, plain) for strategy, tally in tallies.items()]
    best = max(rows[1:], key=lambda r: r["tok_s"])
    tally = tallies[best["strategy"]]
    depth = parse_strategy(best["strategy"]).depth
    documents = [
        (np.asarray(p + r.tokens, np.int32), np.arange(len(p) + len(r.tokens)) >= len(p))
        for p, r in zip(prompts, plain.results, strict=True)
    ]
    simulated = simulate(target, draft, documents, depth, config.data.length).summary()
    say("checking in float32 that speculation changes no token")
    identity = _identity(config, prompts, best["strategy"], size.identity_tokens)
    return {
        "strategy": best["strategy"],
        "plain_tok_s": rows[0]["tok_s"],
        "spec_tok_s": best["tok_s"],
        "speedup": best["speedup_vs_plain"],
        "tau": best["tau"],
        "simulated_tau": round(simulated["simulated_tau"], 4),
        "slot_tau": round(simulated["slot_tau"], 4),
        **identity,
        "identical_bf16": identical_share(tally, plain),
        "parting_gaps_bf16": parting_gaps(target, prompts, tally, plain),
        "rows": rows,
        "machine": describe_machine(),
        "versions": {name: metadata.version(name) for name in ("eagle3-jax", "jax", "flax")},
    }


def _identity(config: Config, prompts, strategy: str, tokens: int) -> dict[str, Any]:
    """identical: whether speculation gives plain decoding's tokens in float32, all prompts as one ragged batch."""
    target = load_target(config.target.path, "float32", quantize=config.target.quantize)
    draft = load_draft(config.run_dir / "export", "float32", target=target)
    with jax.default_matmul_precision("highest"):
        plain = generate(target, None, prompts, tokens)
        chain = generate(target, draft, prompts, tokens, strategy)
    return {"identical": all(a.tokens == b.tokens for a, b in zip(plain, chain, strict=True))}


def table(result: dict[str, Any]) -> list[list[str]]:
    """The measured rows as text cells, header first."""
    lines = [["strategy", "tok/s", "ms/token", "tau", "acceptance by depth", "speed-up", "same tokens (bf16)"]]
    for r in result["rows"]:
        depths = " ".join(f"{a:.2f}" for a in r["acceptance_by_depth"]) or "-"
        same = f"{r['identical_to_plain']:.0%}"
        speedup = f"{r['speedup_vs_plain']:.2f}x"
        lines.append([r["strategy"], f"{r['tok_s']:.1f}", f"{r['ms_per_token']:.1f}", f"{r['tau']:.2f}"])
        lines[-1] += [depths, speedup, same]
    return lines

"""What int8 weights cost and spare: agreement with float32, memory, milliseconds a token.

    python bench/int8.py --target demo --prompts mt_bench.jsonl gsm8k.jsonl --limit 8

The bfloat16 target answers the prompts (JSONL, rows with `turns`) greedily; every copy then reads these answers. A row
of the table: on how many of the answers' tokens the copy and float32 make the same choice, the KL divergence of its
next-token distribution from float32's in nats (mean, and the 99th percentile), bytes of weights, and the milliseconds
of a token of plain decoding, one stream, copies taking turns.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout need not be installed

import jax  # noqa: E402
import numpy as np  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from eagle3_jax.cli.common import start_jax  # noqa: E402
from eagle3_jax.data.records import read_prompts  # noqa: E402
from eagle3_jax.data.template import prompt_ids  # noqa: E402
from eagle3_jax.files import write_whole  # noqa: E402
from eagle3_jax.machine import describe_machine  # noqa: E402

COPIES = {  # name: dtype, quantize; the first is what the others are compared with
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8, float32 activations": ("float32", "int8"),
    "int8, bfloat16 activations": ("bfloat16", "int8"),
}
TIMED = ("bfloat16", "int8, bfloat16 activations")


def log_probabilities(target: e3.Target, prompts, answers) -> Iterator[np.ndarray]:
    """Of each answer, float32 [tokens, V]: what the target says at each of its tokens, given those before."""
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer]
        ids = np.asarray([text + [0] * (length - len(text))], np.int32)
        logits = target.forward(ids, lengths=[len(text)]).logits[0, len(prompt) - 1 : len(text) - 1]
        yield np.asarray(jax.nn.log_softmax(logits))


def compared(targets: dict[str, e3.Target], prompts, answers) -> dict[str, dict[str, float]]:
    """Of each target: share of tokens with the first one's choice, and KL divergence from its distribution."""
    same: dict[str, list[np.ndarray]] = {name: [] for name in targets}
    divergence: dict[str, list[np.ndarray]] = {name: [] for name in targets}
    readings = (log_probabilities(target, prompts, answers) for target in targets.values())
    for exact, *others in zip(*readings, strict=True):
        for name, rough in zip(targets, [exact, *others], strict=True):
            same[name].append(exact.argmax(-1) == rough.argmax(-1))
            divergence[name].append((np.exp(exact) * (exact - rough)).sum(-1))
    joined = {name: (np.concatenate(same[name]), np.concatenate(divergence[name])) for name in targets}
    return {
        name: {"agreement": equal.mean().item(), "kl": kl.mean().item(), "kl_99": np.quantile(kl, 0.99).item()}
        for name, (equal, kl) in joined.items()
    }


def seconds_a_token(target: e3.Target, prompt: list[int], new: int) -> float:
    begin = time.perf_counter()
    result = e3.generate(target, None, prompt, new, stop_token_ids=())
    return (time.perf_counter() - begin) / len(result.tokens)


def weight_bytes(target: e3.Target) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(target.params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each file")
    parser.add_argument("--longest", type=int, default=256, help="longer prompts (in tokens) are left out")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start_jax("bfloat16")
    targets = {name: e3.load_target(args.target, dtype, quantize=kind) for name, (dtype, kind) in COPIES.items()}
    plain = targets["bfloat16"]
    tokenizer = plain.require_tokenizer()
    turns = [turn for file in args.prompts for turn in read_prompts(file)[: args.limit]]
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": turn[0]}]) for turn in turns]
    prompts = [prompt for prompt in prompts if len(prompt) <= args.longest]
    answers = [result.tokens for result in e3.generate(plain, None, prompts, args.new)]
    rows = compared(targets, prompts, answers)
    times: dict[str, list[float]] = {name: [] for name in TIMED}
    for turn in range(1 + args.turns):  # the first compiles
        for name in TIMED:
            seconds = seconds_a_token(targets[name], prompts[0], args.new)
            times[name] += [seconds] * (turn > 0)
    print(f"{len(prompts)} prompts, {sum(map(len, answers))} answer tokens, {describe_machine()}")
    print("| weights | same choice as float32 | KL, nats | KL, 99 % | MB of weights | ms a token |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        row["bytes"] = weight_bytes(targets[name])
        row["ms_per_token"] = 1000 * statistics.median(times[name]) if name in times else None
        shown = "-" if row["ms_per_token"] is None else f"{row['ms_per_token']:.1f}"
        kl, size = f"{row['kl']:.2e} | {row['kl_99']:.2e}", f"{row['bytes'] / 1e6:.0f}"
        print(f"| {name} | {row['agreement']:.1%} | {kl} | {size} | {shown} |")
    if args.json is not None:
        write_whole(args.json, json.dumps({"rows": rows, "machine": describe_machine()}, indent=2) + "\n")


if __name__ == "__main__":
    main()

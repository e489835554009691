"""What the serving engine gives 1, 2, ... greedy streams at once, without HTTP; speculation on against off.

    python bench/engine.py --target demo --draft runs/demo/export --strategies plain,chain:1 --streams 1,8

Prompts are conversations of a JSONL file (`--prompts`, rows with `turns`) or a few built-in ones; each stream has its
own. The cells take turns (`--turns`); a row shows medians. Compare ratios: a machine's milliseconds are its own.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout need not be installed

import eagle3_jax as e3  # noqa: E402
from eagle3_jax.cli.common import open_target  # noqa: E402
from eagle3_jax.serving.engine import Engine  # noqa: E402
from eagle3_jax.serving.requests import Request, Settings  # noqa: E402
from eagle3_jax.speculate.acceptance import tau  # noqa: E402

_QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "List five tips for learning a language.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for a simple vegetable soup.",
    "How do I write a good cover letter?",
    "Describe the water cycle for a child.",
)


def prompts(target: e3.Target, file: Path | None) -> list[tuple[int, ...]]:
    """Token ids of first turns, in the target's chat template."""
    rows = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()] if file else _QUESTIONS
    tokenizer = target.require_tokenizer()

    def ids(text: str) -> tuple[int, ...]:
        message = [{"role": "user", "content": text}]
        return tuple(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])

    return [ids(text) for text in rows]


async def cell(engine: Engine, asked: list[tuple[int, ...]], strategy: str, new: int) -> dict[str, float]:
    """All prompts at once: tokens a second of all together, prompts included, seconds to the first token, and tau."""
    first, accepted = [], []

    async def one(i: int, prompt: tuple[int, ...]) -> int:
        count, params = 0, e3.SamplingParams(new, stop_token_ids=())
        async for delta in engine.stream(Request(f"{time.monotonic_ns()} {i}", prompt, params, strategy)):
            if not count:
                first.append(time.perf_counter())
            count += len(delta.tokens)
            if delta.accepted is not None:
                accepted.append(delta.accepted)
        return count

    begin = time.perf_counter()
    total = sum(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(asked))))
    end = time.perf_counter()
    return {
        "tok_s": total / (end - begin),
        "ttft": statistics.mean(first) - begin,
        "tau": tau(sum(accepted), len(accepted)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--strategies", default="plain,chain:1")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-len", type=int, default=512)
    args = parser.parse_args()
    target = open_target(args.target, args.dtype)
    draft = e3.load_draft(args.draft, dtype=args.dtype)
    streams, strategies = [int(n) for n in args.streams.split(",")], args.strategies.split(",")
    settings = Settings(max(streams), args.max_len, strategies[0], tuple(strategies), prefix_reuse=False)
    engine = Engine(target, draft, settings)
    begin = time.perf_counter()
    engine.start()
    while engine.state == "warming":
        time.sleep(0.1)
    print(f"{engine.state} {engine.error or ''} after {time.perf_counter() - begin:.0f} s", flush=True)
    asked = prompts(target, args.prompts)
    cells: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(args.turns):
        for count in streams:
            for strategy in strategies:
                some = [asked[i % len(asked)] for i in range(count)]
                cells.setdefault((count, strategy), []).append(asyncio.run(cell(engine, some, strategy, args.new)))
    medians = {key: {k: statistics.median(c[k] for c in runs) for k in runs[0]} for key, runs in cells.items()}
    print("| streams | strategy | tok/s | against one stream | against the first strategy | first token, s | tau |")
    print("|---|---|---|---|---|---|---|")
    for (count, strategy), m in medians.items():
        one, base = medians[streams[0], strategy]["tok_s"], medians[count, strategies[0]]["tok_s"]
        print(
            f"| {count} | {strategy} | {m['tok_s']:.1f} | {m['tok_s'] / one:.2f}x | {m['tok_s'] / base:.2f}x "
            f"| {m['ttft']:.2f} | {m['tau']:.2f} |"
        )
    asyncio.run(engine.drain(5))


if __name__ == "__main__":
    main()

"""What the serving engine gives 1, 2, ... greedy streams at once, without HTTP; speculation on against off.

    python bench/engine.py --target demo --draft runs/demo/export --strategies off,plain,chain:1,auto --streams 1,8

"off" is an engine without a draft; "plain" one that has a draft and does not use it; "auto" chooses among the others
that are named, or among those that a server has if none of them drafts. Prompts are conversations of a
JSONL file (`--prompts`, rows with `turns`) or a few built-in ones; each stream has its own. The cells take turns
(`--turns`), each second turn in the opposite order; a row shows medians, of ratios those of the turns' ratios. Compare
ratios: a machine's milliseconds are its own.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout need not be installed

import eagle3_jax as e3  # noqa: E402
from eagle3_jax.cli.common import open_target  # noqa: E402
from eagle3_jax.data.records import read_prompts  # noqa: E402
from eagle3_jax.data.template import prompt_ids  # noqa: E402
from eagle3_jax.serving.engine import Engine  # noqa: E402
from eagle3_jax.serving.requests import Request, Settings  # noqa: E402
from eagle3_jax.serving.strategies import AUTO  # noqa: E402
from eagle3_jax.speculate.acceptance import tau  # noqa: E402

OFF = "off"
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
    texts, tokenizer = [turns[0] for turns in read_prompts(file)] if file else _QUESTIONS, target.require_tokenizer()
    return [tuple(prompt_ids(tokenizer, [{"role": "user", "content": text}])) for text in texts]


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


def started(engine: Engine) -> None:
    """Returns when everything is compiled."""
    engine.start()
    while engine.state == "warming":
        time.sleep(0.1)
    if engine.state != "ready":
        raise SystemExit(engine.error)


def ratio(runs: list[dict[str, float]], others: list[dict[str, float]]) -> float:
    """Median over the turns of how many times the tokens a second of `others` there are."""
    return statistics.median(run["tok_s"] / other["tok_s"] for run, other in zip(runs, others, strict=True))


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
    drafting = tuple(strategy for strategy in strategies if strategy not in (OFF, "plain", AUTO))
    default = AUTO if AUTO in strategies else "plain"
    settings = Settings(max(streams), args.max_len, default, drafting, prefix_reuse=False)
    begin, engines = time.perf_counter(), {}
    for strategy in strategies:
        without = strategy == OFF
        if without not in engines:
            engines[without] = Engine(target, None if without else draft, settings)
            started(engines[without])
    print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
    asked = prompts(target, args.prompts)
    cells: dict[tuple[int, str], list[dict[str, float]]] = {}
    for turn in range(args.turns):
        for count in streams:
            for strategy in strategies[:: 1 if turn % 2 == 0 else -1]:
                some, name = [asked[i % len(asked)] for i in range(count)], "plain" if strategy == OFF else strategy
                ran = asyncio.run(cell(engines[strategy == OFF], some, name, args.new))
                cells.setdefault((count, strategy), []).append(ran)
    print("| streams | strategy | tok/s | against one stream | against the first strategy | first token, s | tau |")
    print("|---|---|---|---|---|---|---|")
    for count in streams:
        for strategy in strategies:
            runs, one, base = cells[count, strategy], cells[streams[0], strategy], cells[count, strategies[0]]
            tok_s, ttft, tau_ = (statistics.median(run[key] for run in runs) for key in ("tok_s", "ttft", "tau"))
            print(
                f"| {count} | {strategy} | {tok_s:.1f} | {ratio(runs, one):.2f}x | {ratio(runs, base):.2f}x "
                f"| {ttft:.2f} | {tau_:.2f} |"
            )
    for engine in engines.values():
        asyncio.run(engine.drain(5))


if __name__ == "__main__":
    main()

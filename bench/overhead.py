"""What HTTP costs: `python bench/overhead.py --target demo --draft runs/demo/export [--streams 8] [--json FILE]`.

The same streams, of the same prompts and lengths, in turns: from an engine in this process, and from `serve.py` with
the same settings through its API (streamed completions). Each turn counts all tokens over the time from the first
request to the last token; the overhead is 1 - HTTP / direct of the medians. Other options go to `serve.py`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout need not be installed

import eagle3_jax as e3  # noqa: E402
from bench.http_client import Address, request  # noqa: E402
from bench.server import started  # noqa: E402
from bench.workload import prompts  # noqa: E402
from eagle3_jax.data.template import prompt_ids  # noqa: E402
from eagle3_jax.files import write_whole  # noqa: E402
from eagle3_jax.machine import describe_machine  # noqa: E402
from eagle3_jax.serving.engine import Engine  # noqa: E402
from eagle3_jax.serving.requests import Request, Settings  # noqa: E402
from eagle3_jax.speculate.request import SamplingParams  # noqa: E402

Prompts = Sequence[tuple[int, ...]]


async def direct(engine: Engine, texts: Prompts, tokens: int, strategy: str) -> float:
    """tok/s of an engine's own streams."""

    async def one(ids: tuple[int, ...]) -> int:
        params = SamplingParams(max_new_tokens=tokens, stop_token_ids=())
        async with aclosing(engine.stream(Request(uuid.uuid4().hex, ids, params, strategy))) as deltas:
            return sum([len(delta.tokens) async for delta in deltas])

    return await _rate([one(ids) for ids in texts])


async def through_http(address: Address, texts: Prompts, tokens: int, strategy: str) -> float:
    """tok/s of the same streams from a server."""

    async def one(ids: tuple[int, ...]) -> int:
        body = {"prompt": list(ids), "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "eagle3": {"strategy": strategy}}
        count = 0
        async with request(address, "/v1/completions", body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {(await reply.body())[:300]!r}")
            async for event in reply.events():
                count = (event.get("usage") or {}).get("completion_tokens", count)
        return count

    return await _rate([one(ids) for ids in texts])


async def _rate(streams: list) -> float:
    begun = time.perf_counter()
    counts = await asyncio.gather(*streams)
    return sum(counts) / (time.perf_counter() - begun)


async def measure(options: argparse.Namespace, server_options: list[str], log: Path) -> dict[str, Any]:
    target = e3.load_target(options.target, dtype=options.dtype)
    draft = e3.load_draft(options.draft, dtype=options.dtype, target=target)
    texts = [
        tuple(prompt_ids(target.tokenizer, [{"role": "user", "content": text}]))
        for text in prompts()[: options.streams]
    ]
    engine = Engine(target, draft, Settings(slots=options.streams, max_len=options.max_len, strategy=options.strategy))
    engine.start()
    same = ["--target", options.target, "--draft", options.draft, "--dtype", options.dtype]
    same += ["--slots", str(options.streams), "--max-len", str(options.max_len), "--strategy", options.strategy]
    rates: dict[str, list[float]] = {"direct": [], "http": []}
    async with started([*same, *server_options], log) as server:
        for turn in range(options.turns + 1):
            took = {
                "direct": await direct(engine, texts, options.tokens, options.strategy),
                "http": await through_http(server.address, texts, options.tokens, options.strategy),
            }
            if turn:  # the first one warms up
                for name, rate in took.items():
                    rates[name].append(rate)
                print(f"turn {turn}: direct {took['direct']:.1f}, http {took['http']:.1f} tok/s", flush=True)
    await engine.drain(10)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    overhead = 1 - medians["http"] / medians["direct"]
    print(f"overhead of HTTP at {options.streams} streams: {overhead:.1%}")
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "starlette", "uvicorn")}
    report = {"streams": options.streams, "strategy": options.strategy, "tok_s": rates, "overhead": overhead}
    return report | {"machine": describe_machine(), "versions": versions}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--strategy", default="chain:3")
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options, server_options = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = asyncio.run(measure(options, server_options, Path(folder) / "server.log"))
        except (RuntimeError, e3.UserError) as error:
            print(f"overhead.py: {error}", file=sys.stderr)
            return 1
    if options.json:
        write_whole(options.json, json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

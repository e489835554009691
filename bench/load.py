"""A server under load: `python bench/load.py --target demo --draft runs/demo/export [--requests 100] [--json FILE]`.

Starts `serve.py` on a free loopback port and sends it requests of mixed shape (`bench/workload.py`) at random times
(Poisson arrivals at --rate, at most --in-flight at once), of which some hang up in the middle and some are no requests
at all. Each strategy is a run of its own and a row; with --mixed one run asks for all of them in turn. With --check
every answer is compared with what the server said to the same request alone, decoded plainly.

Times are seen from the client: first = until the first text; step = between texts of an answer, each of which is a
step of the model and, with speculation, several tokens. tok/s counts the tokens of whole answers over the whole run.
The exit status is 1 if an answer was wrong or missing, if the server kept something (slots, KV), grew by more than 5 %
between a quarter of the requests and the end, or did not end well. `make soak` is 2,000 requests to a tiny pair.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout need not be installed

from bench.http_client import Address, metrics, request  # noqa: E402
from bench.server import started  # noqa: E402
from bench.workload import Job, jobs, malformed  # noqa: E402
from eagle3_jax.files import write_whole  # noqa: E402

_GROWTH = 0.05  # of resident memory between a quarter of the requests and the end
_PATIENCE = 300.0  # seconds for one request, 429s included

Answer = tuple[tuple[str, str, int], ...]  # of each choice: text, finish reason, tokens of all choices


@dataclass(frozen=True)
class Plan:
    """rate: arrivals a second; in_flight: most requests at once. abort, malformed: shares of the requests."""

    requests: int
    rate: float
    in_flight: int
    abort: float = 0.0
    malformed: float = 0.0
    seed: int = 0


@dataclass
class Seen:
    """What came of a run. outcomes: "answered", "aborted", "refused" (malformed ones), "busy" (429s, asked again) and
    faults: each of them a line of text. Times in seconds; accepted: of each round."""

    outcomes: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    rss_mb: list[float] = field(default_factory=list)


class Busy(Exception):
    """429; seconds: what Retry-After says."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds


async def ask(address: Address, job: Job, strategy: str, seen: Seen | None = None, leave_after: int = 0) -> Answer:
    """One request and its answer; empty if it hung up, after `leave_after` texts.

    Raises Busy, and ValueError for an answer that is none.
    """
    begun = last = time.monotonic()
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    tokens, accepted = 0, []
    async with request(address, job.path, job.asking(strategy)) as reply:
        if reply.status == 429:
            raise Busy(float(reply.headers["retry-after"]))
        if reply.status != 200:
            raise ValueError(f"status {reply.status}: {(await reply.body())[:200]!r}")
        streamed = job.body.get("stream")
        arrived = 0
        async for part in reply.events() if streamed else _whole(reply):
            if "error" in part:
                raise ValueError(f"in the stream: {part['error']}")
            now = time.monotonic()
            for choice in part["choices"]:
                text = _text(choice)
                texts[choice["index"]] = texts.get(choice["index"], "") + text
                reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"], "")
                if text and streamed and seen is not None:
                    (seen.step if arrived else seen.first).append(now - (last if arrived else begun))
                    arrived, last = arrived + 1, now
            tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
            accepted = (part.get("eagle3") or {}).get("accepted", accepted)
            if leave_after and arrived >= leave_after:
                return ()
    if seen is not None:
        seen.tokens += tokens
        seen.accepted += accepted or []
    return tuple((texts[i], reasons[i], tokens) for i in sorted(texts))


async def _whole(reply):
    yield json.loads(await reply.body())


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""


async def refused(address: Address, path: str, body: bytes) -> str | None:
    """Sends what is no request; None if it was refused as it should be, else what is wrong."""
    async with request(address, path, body) as reply:
        said = await reply.body()
        if not 400 <= reply.status < 500 or reply.status == 429:
            return f"{body[:80]!r} was answered with status {reply.status}"
    try:
        return None if json.loads(said)["error"]["message"] else f"{body[:80]!r} was refused without a message"
    except (ValueError, KeyError):
        return f"{body[:80]!r} was refused with {said[:80]!r}"


async def run(
    address: Address,
    pool: Sequence[Job],
    strategies: Sequence[str],
    plan: Plan,
    expected: dict[int, Answer] | None = None,
    rss_mb: Callable[[], float] | None = None,
) -> Seen:
    """Sends the requests of a plan. expected: the right answer to each job, compared with where given."""
    rng, seen, room = random.Random(plan.seed), Seen(), asyncio.Semaphore(plan.in_flight)
    wrong_requests = malformed()
    done = 0

    async def one(number: int, job: Job, strategy: str, leave_after: int) -> None:
        nonlocal done
        try:
            async with asyncio.timeout(_PATIENCE):
                await _until_taken(number, job, strategy, leave_after)
        except Exception as error:  # whatever it is, it is a fault of this request and told as such
            seen.faults.append(f"request {number}, job {job.number}, {strategy}: {type(error).__name__}: {error}")
        finally:
            room.release()
            done += 1
            if rss_mb and done in (plan.requests // 4, plan.requests):
                seen.rss_mb.append(rss_mb())

    async def _until_taken(number: int, job: Job, strategy: str, leave_after: int) -> None:
        if leave_after < 0:
            fault = await refused(address, *wrong_requests[number % len(wrong_requests)])
            seen.outcomes["refused"] += 1
            if fault:
                seen.faults.append(f"request {number}: {fault}")
            return
        # What is not streamed has no texts to count: hang up after a while.
        hurry = 0.01 * leave_after if leave_after and not job.body.get("stream") else None
        while True:
            try:
                async with asyncio.timeout(hurry) as limit:
                    answer = await ask(address, job, strategy, seen, leave_after)
                break
            except TimeoutError:
                if not limit.expired() or hurry is None:
                    raise
                answer = ()
                break
            except Busy as busy:
                seen.outcomes["busy"] += 1
                await asyncio.sleep(busy.seconds)
        seen.outcomes["answered" if answer else "aborted"] += 1
        if expected is not None and answer and answer != expected[job.number]:
            said = f"{answer} instead of {expected[job.number]}"
            seen.faults.append(f"request {number}, job {job.number}, {strategy}: wrong answer: {said}")

    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(plan.requests):
            fate = rng.random()
            leave_after = -1 if fate < plan.malformed else rng.randint(1, 4) * (fate < plan.malformed + plan.abort)
            await room.acquire()
            group.create_task(one(number, rng.choice(pool), strategies[number % len(strategies)], leave_after))
            await asyncio.sleep(rng.expovariate(plan.rate))
    seen.seconds = time.monotonic() - begun
    seen.faults += await kept(address)
    if rss_mb and seen.rss_mb[-1] > seen.rss_mb[0] * (1 + _GROWTH):
        seen.faults.append(f"memory grew from {seen.rss_mb[0]:.0f} to {seen.rss_mb[-1]:.0f} MB")
    return seen


async def kept(address: Address, patience: float = 10.0) -> list[str]:
    """What an idle server still holds, once it had time to let go."""
    until = time.monotonic() + patience
    while True:
        try:
            values = await metrics(address)
        except OSError as error:
            return [f"the server has gone: {error}"]
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        held = [f"idle, but {name} is {values[name]}" for name in names if values[name]]
        if not held or time.monotonic() > until:
            return held
        await asyncio.sleep(0.1)


async def alone(address: Address, pool: Sequence[Job]) -> dict[int, Answer]:
    """What the server says to each job, one after the other, decoded plainly."""
    return {job.number: await ask(address, job, "plain") for job in pool}


def row(strategy: str, seen: Seen) -> dict[str, Any]:
    """A run's line of the report; times in milliseconds."""
    return {
        "strategy": strategy,
        "outcomes": dict(seen.outcomes),
        "faults": len(seen.faults),
        "seconds": seen.seconds,
        "tok_s": seen.tokens / seen.seconds,
        "tau": 1 + statistics.fmean(seen.accepted) if seen.accepted else None,
        "first_ms": percentiles(seen.first),
        "step_ms": percentiles(seen.step),
        "rss_mb": seen.rss_mb,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """{"50", "90", "99"} in milliseconds; empty for fewer than two values."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {str(p): 1000 * cuts[p - 1] for p in (50, 90, 99)}


def show(result: dict[str, Any]) -> None:
    def spread(values: dict[str, float]) -> str:
        return " / ".join(f"{value:.0f}" for value in values.values()) or "-"

    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(result["outcomes"].items()))
    tau = "-" if result["tau"] is None else f"{result['tau']:.2f}"
    print(
        f"{result['strategy']:16} {result['tok_s']:8.1f} tok/s  tau {tau}  first {spread(result['first_ms'])} ms  "
        f"step {spread(result['step_ms'])} ms  (50 / 90 / 99 %)\n"
        f"{'':16} {outcomes}, {result['faults']} faults in {result['seconds']:.1f} s"
        + (f"; server {' -> '.join(f'{mb:.0f}' for mb in result['rss_mb'])} MB" if result["rss_mb"] else ""),
        flush=True,
    )


async def measure(options: argparse.Namespace, server_options: list[str], log: Path) -> dict[str, Any]:
    """The whole report, row by row as it comes."""
    pool = jobs(options.jobs, options.longest_prompt, options.longest_answer, options.seed)
    names = options.strategies.split(",")
    runs = [("mixed", names)] if options.mixed else [(name, [name]) for name in names]
    plan = Plan(options.requests, options.rate, options.in_flight, options.abort, options.malformed, options.seed)
    rows, faults = [], []
    async with started(server_options, log) as server:
        for job in pool[:4]:  # first of their kind
            await ask(server.address, job, names[0])
        expected = await alone(server.address, pool) if options.check else None
        for name, strategies in runs:
            seen = await run(server.address, pool, strategies, plan, expected, server.rss_mb)
            faults += seen.faults
            rows.append(row(name, seen))
            show(rows[-1])
    return {"rows": rows, "faults": faults, "server": server_options}


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Other options go to serve.py.")
    parser.add_argument("--tiny", action="store_true", help="serve a tiny pair in float32 (bench/tiny_pair.py)")
    parser.add_argument("--requests", type=int, default=100, help="of each run")
    parser.add_argument("--rate", type=float, default=4.0, help="mean arrivals a second")
    parser.add_argument("--in-flight", type=int, default=32, help="most requests at once")
    parser.add_argument("--strategies", default="plain,auto")
    parser.add_argument("--mixed", action="store_true", help="one run with all strategies in turn")
    parser.add_argument("--abort", type=float, default=0.0, help="share of requests that hang up")
    parser.add_argument("--malformed", type=float, default=0.0, help="share of requests that are none")
    parser.add_argument("--check", action="store_true", help="compare each answer with the plain one, alone (float32)")
    parser.add_argument("--jobs", type=int, default=40, help="different requests")
    parser.add_argument("--longest-prompt", type=int, default=240, help="in characters")
    parser.add_argument("--longest-answer", type=int, default=64, help="in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-log", type=Path, help="keep what the server prints in this file")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options, server_options = parser.parse_known_args(arguments)
    for name in ("requests", "rate", "in_flight", "jobs", "longest_prompt", "longest_answer"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    if not 0 <= options.abort + options.malformed <= 1 or min(options.abort, options.malformed) < 0:
        parser.error("--abort and --malformed are shares of the requests: 0 to 1 together")
    return options, server_options


def main(arguments: Sequence[str] | None = None) -> int:
    options, server_options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            from bench.tiny_pair import write_tiny_pair

            target, draft = write_tiny_pair(Path(folder))
            server_options += ["--target", str(target), "--draft", str(draft), "--dtype", "float32"]
        try:
            log = options.server_log or Path(folder) / "server.log"
            report = asyncio.run(measure(options, server_options, log))
        except RuntimeError as error:
            print(f"load.py: {error}", file=sys.stderr)
            return 1
    report["versions"] = {name: metadata.version(name) for name in ("jax", "jaxlib", "starlette", "uvicorn")}
    if options.json:
        write_whole(options.json, json.dumps(report, indent=1) + "\n")
    for fault in report["faults"][:20]:
        print(f"fault: {fault}")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())

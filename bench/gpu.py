"""What speculation costs and gains on one accelerator: `python bench/gpu.py [--shape llama-3.1-8b] [--json FILE]`.

Needs no files: target and draft of a real model's shape get random bf16 weights on the device, set so that every draft
token is accepted (`eagle3_jax.bench.random_pair`), and the product's own compiled programs are timed on them: plain
decoding against the time that reading the weights takes, one draft step, verification of 1 to 64 rows, whole rounds.

Each row of the table is a program, and compiling takes most of the time. The programs of one batch size are compiled in
threads, then timed alone on the device and printed, so that a run that is cut shows what it has; its status is 1. XLA
tunes matmuls by timing them while it compiles: `--threads 1` compiles one by one, undisturbed. With
JAX_COMPILATION_CACHE_DIR set, a second run takes its programs from there.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout need not be installed

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from eagle3_jax.bench.parts import Drafting, Verifying, draft_step, verify  # noqa: E402
from eagle3_jax.bench.random_pair import SHAPES, RandomPair, noise, random_pair  # noqa: E402
from eagle3_jax.errors import UserError  # noqa: E402
from eagle3_jax.files import write_whole  # noqa: E402
from eagle3_jax.machine import describe_machine  # noqa: E402
from eagle3_jax.speculate.generate import parse_strategy, round_up  # noqa: E402
from eagle3_jax.speculate.round import Committed, Models, Weights, prefill, speculate  # noqa: E402

_STEPS, _REPEATS = 16, 3  # calls timed together, and how often
_COPY_BYTES = 4 * 2**30
_COLUMNS = {  # key of a row: title, width, format
    "batch": ("batch", 5, "d"),
    "what": ("what", 10, ""),
    "rows": ("rows", 4, "d"),
    "ms": ("ms", 9, ".3f"),
    "vs_plain": ("/ plain", 7, ".2f"),
    "floor_ms": ("floor ms", 8, ".3f"),
    "vs_floor": ("/ floor", 7, ".2f"),
    "kv_ms": ("kv ms", 7, ".3f"),
    "fetched_ms": ("fetched", 9, ".3f"),
    "tok_s": ("tok/s", 8, ".1f"),
    "tau": ("tau", 5, ".2f"),
    "speedup": ("speed-up", 8, ".2f"),
    "bound": ("bound", 5, ".2f"),
}
_EXPLANATION = """\
ms: one call, called back to back.  floor: reading the weights once at the copy bandwidth;  kv: reading the context's
keys and values so.  fetched: with each outcome fetched while the next call runs, as generation does; tok/s and the
speed-up are of that.  bound: tau / (v + K d), from the rows of verification and draft step."""


Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A row of the table. program: called with `weights` and a carry of the abstract form `carry`, it returns the next
    carry and an outcome. weight_bytes, kv_bytes: of weights, of keys and values that a call must read."""

    what: str
    rows: int
    program: jax.stages.Lowered
    weights: Weights
    carry: Any
    weight_bytes: int
    kv_bytes: int


class Timing(NamedTuple):
    """Milliseconds a call: called back to back, and with each outcome fetched while the next call runs, as generation
    on accelerators does.

    tau: mean tokens that a call commits. The latter two are None for a program that commits nothing.
    """

    ms: float
    fetched_ms: float | None
    tau: float | None


class Clock:
    """Seconds since the start, out of those allowed."""

    def __init__(self, allowed: float):
        self._begin, self._allowed = time.perf_counter(), allowed

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._begin

    @property
    def left(self) -> float:
        return max(self._allowed - self.spent, 0.0)


def cases(pair: RandomPair, batch: int, rows: list[int], depth: int, context: int) -> Iterator[Case]:
    """The programs of one batch size, traced one by one, the most important first; nothing is allocated."""
    models, weights, config = pair.models, pair.weights, pair.config
    plain, chain = parse_strategy("plain"), parse_strategy(f"chain:{depth}")
    cache_length = round_up(context + max(*rows, _STEPS * (depth + 1)) + depth + 1, 128)
    layer_kv = 2 * 2 * batch * context * config.num_kv_heads * config.head_dim
    kv = config.num_layers * layer_kv
    prompts = jax.ShapeDtypeStruct((batch, 32), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    state, _ = jax.eval_shape(
        lambda weights, ids, lengths: prefill(models, cache_length, weights, ids, lengths, None),
        *(weights, *prompts),
    )
    alone, without_draft = Weights(weights.target, None, None), state._replace(draft=None)
    program = speculate.lower(Models(models.target, None, None), plain, alone, without_draft)
    yield Case("plain", 1, program, alone, without_draft, pair.target_bytes, kv)

    hidden = jax.ShapeDtypeStruct((batch, 1, config.hidden_size), jnp.bfloat16)
    carry = Drafting(state.draft.cache, state.length, jax.ShapeDtypeStruct((batch, 1), jnp.int32), hidden)
    yield Case("draft step", 1, draft_step.lower(models, weights, carry), weights, carry, pair.step_bytes, layer_kv)

    def block(count: int) -> Case:
        carry = Verifying(state.cache, state.length, jax.ShapeDtypeStruct((batch, count), jnp.int32))
        return Case("verify", count, verify.lower(models, weights, carry), weights, carry, pair.target_bytes, kv)

    yield block(depth + 1)
    total = pair.target_bytes + pair.fc_bytes + depth * pair.step_bytes
    program = speculate.lower(models, chain, weights, state)
    yield Case(f"chain:{depth}", depth + 1, program, weights, state, total, kv + depth * layer_kv)
    yield from (block(count) for count in rows if count != depth + 1)


def begin_compiling(pool: ThreadPoolExecutor, listed: Iterable[Case], clock: Clock) -> list[tuple[Case, Future]]:
    """Each case with its compiled program to come, or None to come if its turn is after the time allowed."""

    def compile_in_time(case: Case) -> jax.stages.Compiled | None:
        return case.program.compile() if clock.left else None

    return [(case, pool.submit(compile_in_time, case)) for case in listed]


def filled(carry: Any, context: int) -> Any:
    """A carry in the middle of a text of `context` tokens: random caches and hidden states, ones for ids."""
    leaves, structure = jax.tree.flatten(carry)
    leaves = [
        noise(jax.random.key(i), leaf.shape, 1.0) if leaf.dtype == jnp.bfloat16 else jnp.ones(leaf.shape, leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return _at(jax.tree.unflatten(structure, leaves), context)


def _at(carry: Any, context: int) -> Any:
    return jax.block_until_ready(carry._replace(length=jnp.full_like(carry.length, context)))


def time_calls(program: jax.stages.Compiled, weights: Weights, carry: Any, context: int) -> Timing:
    """Medians over repeats, each from the same length on; fewer calls of a program that takes long."""
    for _ in range(2):  # the first call loads the program; a round's first features are noise
        begin = time.perf_counter()
        carry, outcome = program(weights, carry)
        jax.block_until_ready(outcome)
        once = time.perf_counter() - begin
    steps = max(3, min(_STEPS, round(0.25 / once)))
    spans, fetched_spans, taus = [], [], []
    for _ in range(_REPEATS):
        carry = _at(carry, context)
        begin = time.perf_counter()
        for _ in range(steps):
            carry, outcome = program(weights, carry)
        jax.block_until_ready(outcome)
        spans.append((time.perf_counter() - begin) / steps)
        if not isinstance(outcome, Committed):
            continue
        carry = _at(carry, context)
        begin = time.perf_counter()
        carry, outcome = program(weights, carry)
        for _ in range(steps):
            carry, following = program(weights, carry)
            taus.append(1 + jax.device_get(outcome).accepted.mean())
            outcome = following
        fetched_spans.append((time.perf_counter() - begin) / steps)
    if not taus:
        return Timing(1000 * statistics.median(spans), None, None)
    return Timing(1000 * statistics.median(spans), 1000 * statistics.median(fetched_spans), float(np.mean(taus)))


def copy_bandwidth(size: int) -> float:
    """Bytes a second, read and written, of copying `size` bytes on the device; the best of several."""
    copy = jax.jit(lambda x: x + 1)
    array = jax.block_until_ready(copy(jnp.zeros(size // 4, jnp.int32)))
    spans = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(4):
            array = copy(array)
        jax.block_until_ready(array)
        spans.append((time.perf_counter() - begin) / 4)
    return 2 * array.nbytes / min(spans)


def row(case: Case, batch: int, timing: Timing, before: list[Row], bandwidth: float) -> Row:
    """A row of the table. before: the rows of this batch so far, plain first. bandwidth: bytes a second."""
    floor_ms = 1000 * case.weight_bytes / bandwidth
    cells = {"batch": batch, "what": case.what, "rows": case.rows, "ms": timing.ms}
    plain = before[0] if before else cells | {"fetched_ms": timing.fetched_ms}
    cells |= {"vs_plain": timing.ms / plain["ms"], "floor_ms": floor_ms, "vs_floor": timing.ms / floor_ms}
    cells["kv_ms"] = 1000 * case.kv_bytes / bandwidth
    if timing.tau is not None:
        cells |= {"fetched_ms": timing.fetched_ms, "tau": timing.tau}
        cells["tok_s"] = 1000 * batch * timing.tau / timing.fetched_ms
        cells["speedup"] = timing.tau * plain["fetched_ms"] / timing.fetched_ms
    cost = {(r["what"], r["rows"]): r["vs_plain"] for r in before}
    v, d = cost.get(("verify", case.rows)), cost.get(("draft step", 1))
    if before and timing.tau is not None and v and d:
        cells["bound"] = timing.tau / (v + (case.rows - 1) * d)
    return cells


def text(cells: Row) -> str:
    """The cells of a row, or the titles, in columns; empty where the row has none."""
    return "  ".join(
        (cells[key] if isinstance(cells.get(key), str) else format(cells[key], form) if key in cells else "").rjust(
            width
        )
        for key, (_, width, form) in _COLUMNS.items()
    ).rstrip()


def measure(options: argparse.Namespace, say: Callable[[str], None], save: Callable[[dict], None]) -> dict[str, Any]:
    """Runs everything, saying each row as it comes and saving the report after each batch size."""
    clock = Clock(options.seconds)
    pair = random_pair(options.shape)
    bandwidth = copy_bandwidth(min(_COPY_BYTES, pair.target_bytes))
    versions = {name: metadata.version(name) for name in ("jax", "flax")}
    report = {"shape": options.shape, "context": options.context, "machine": describe_machine(), "versions": versions}
    report |= {"copy_gb_s": bandwidth / 1e9, "target_gb": pair.target_bytes / 1e9}
    rows: list[Row] = []
    expected = len(options.batch) * (3 + len({*options.rows, options.depth + 1}))
    report |= {"rows": rows, "failed": [], "complete": False}
    say(f"{options.shape}, bf16, context {options.context}, {report['machine']['device']}, jax {versions['jax']}")
    say(f"copy bandwidth {report['copy_gb_s']:.0f} GB/s; weights read by a step {report['target_gb']:.2f} GB")
    say(text({key: title for key, (title, _, _) in _COLUMNS.items()}))

    def traced(batch: int) -> Iterator[Case]:
        listed = cases(pair, batch, options.rows, options.depth, options.context)
        return itertools.takewhile(lambda _: clock.left, listed)

    upcoming: Iterable[Case] = traced(options.batch[0])
    for batch, following in itertools.zip_longest(options.batch, options.batch[1:]):
        with ThreadPoolExecutor(options.threads) as pool:
            programs = begin_compiling(pool, upcoming, clock)
            upcoming = [] if following is None else list(traced(following))  # while those compile
        say(f"programs for batch {batch} compiled, {clock.spent:.0f} s after the start")
        rows += measure_batch(programs, batch, options.context, bandwidth, report["failed"], say)
        report |= {"complete": len(rows) == expected, "seconds": clock.spent}
        save(report)
    say(_EXPLANATION)
    if not report["complete"]:
        late = f"a program that failed or was not begun within {options.seconds:g} s (--seconds) has none"
        say(f"incomplete: {len(rows)} of {expected} rows; {late}")
    return report


def measure_batch(
    programs: list[tuple[Case, Future]],
    batch: int,
    context: int,
    bandwidth: float,
    failed: list[dict[str, Any]],
    say: Callable[[str], None],
) -> list[Row]:
    """Times the programs that were compiled, plain first; one that fails (too large, say) is told and left out."""
    rows: list[Row] = []
    for case, future in programs:
        try:
            if (program := future.result()) is None:
                continue
            timing = time_calls(program, case.weights, filled(case.carry, context), context)
        except jax.errors.JaxRuntimeError as error:
            failed.append({"batch": batch, "what": case.what, "rows": case.rows, "error": str(error)})
            say(f"batch {batch} {case.what} {case.rows} failed: {str(error).splitlines()[0]}")
            if case.what == "plain":
                break  # everything else is told in relation to it
            continue
        rows.append(row(case, batch, timing, rows, bandwidth))
        say(text(rows[-1]))
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--batch", type=_numbers, default=[1, 8, 32], help="comma-separated (1,8,32)")
    parser.add_argument("--rows", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64], help="verified, comma-separated")
    parser.add_argument("--depth", type=_number, default=7, help="draft tokens of a round (7)")
    parser.add_argument("--context", type=_number, default=1024, help="tokens read before (1024)")
    parser.add_argument("--seconds", type=float, default=180, help="after so many, no program is begun (180)")
    parser.add_argument("--threads", type=_number, default=os.cpu_count() or 1, help="that compile (one a core)")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: no folder {options.json.parent} / {options.json} / make it first")
    try:
        parse_strategy(f"chain:{options.depth}")
    except UserError as error:
        parser.error(f"--depth: {error}")
    return options


def _number(value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number above 0")
    return int(value)


def _numbers(value: str) -> list[int]:
    return list(dict.fromkeys(_number(part.strip()) for part in value.split(",")))


def save(path: Path | None, report: dict[str, Any]) -> None:
    """Writes the report whole or not at all; does nothing for None. Raises UserError if it cannot be written."""
    if path is None:
        return
    try:
        write_whole(path, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json: cannot write the report / {path} / {error.strerror or error}") from error


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)

    try:
        report = measure(options, functools.partial(print, flush=True), functools.partial(save, options.json))
    except UserError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    return 0 if report["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())

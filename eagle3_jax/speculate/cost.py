"""What a round of each strategy costs on this device with this pair: measured once, then read from files.

Costs are in plain rounds, since only their ratios decide what to do. The files are ~/.cache/eagle3_jax/costs/*/*.json
(or below XDG_CACHE_HOME): a folder for each pair of models, device, jax version, batch size (the next power of two) and
kind of sampling, in it a file for each strategy and length of the caches. So programs that measure at the same time
keep what they find side by side. Any of them may be deleted.

A round of any strategy reads the caches once, so that ratios change little with their length: a length that was not
measured has the costs of the nearest one that was, if that is at most four times as long or short.
"""

import hashlib
import json
import logging
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.draft.draft import Draft
from eagle3_jax.files import write_whole
from eagle3_jax.machine import describe_machine
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.round import Models, State, Weights, speculate
from eagle3_jax.speculate.strategy import PLAIN, Strategy

Costs = dict[Strategy, float]
_TURNS, _FEWEST_TURNS, _SECONDS = 11, 3, 60.0
_ROUNDS = 2
_NEAR = 4  # times as long or short as the length of the caches for which costs are wanted
_log = logging.getLogger(__name__)


def known_costs(
    key: dict[str, Any], entries: int, strategies: Sequence[Strategy], measure: Callable[[list[Strategy]], Costs]
) -> Costs:
    """What a round of each strategy costs, in plain rounds, with caches of `entries`. What is not known yet is measured
    now, and kept.

    measure: that, of these strategies; the first one is plain decoding. A file that cannot be used or written is logged
    and otherwise ignored.
    """
    folder, costs = cost_folder(key), {PLAIN: 1.0}
    costs |= _nearest(_read(folder, key, strategies), entries)
    if missing := [strategy for strategy in strategies if strategy not in costs]:
        names = ", ".join(strategy.text for strategy in missing)
        words = "note: measuring what rounds of %s cost at batch %d (once, kept in %s)"
        _log.warning(words, names, key["batch"], folder)
        measured = measure([PLAIN, *missing])
        found = {strategy: measured[strategy] for strategy in missing}
        _write(folder, key, entries, found)
        costs |= found
    return {strategy: costs[strategy] for strategy in strategies}


def compare_each[Case: Hashable](
    run: Callable[[Case], None], cases: Sequence[Case], prepare: Callable[[], None] = lambda: None
) -> dict[Case, float]:
    """How many times as long as run(cases[0]) each run(case) takes, the median of some turns.

    A machine's speed changes from second to second, and other programs take it for a while. So each case runs right
    beside the first one, after it and before it in turns, and only the ratios of two such runs count. A first run of
    each case, which compiles, is not counted, nor is `prepare` before each run.
    """

    def seconds(case: Case) -> float:
        prepare()
        begin = time.perf_counter()
        run(case)
        return time.perf_counter() - begin

    first, *others = cases
    for case in cases:
        seconds(case)
    ratios, begun = {case: [] for case in others}, time.perf_counter()
    for turn in range(_TURNS):
        for case in others:
            took = {each: seconds(each) for each in ((first, case), (case, first))[turn % 2]}
            ratios[case].append(took[case] / took[first])
        if turn + 1 >= _FEWEST_TURNS and time.perf_counter() - begun > _SECONDS:
            break
    return {first: 1.0} | {case: statistics.median(found) for case, found in ratios.items()}


def measure_rounds(
    models: Models, weights: Weights, strategies: Sequence[Strategy], state: State
) -> tuple[Costs, State]:
    """What a round of each strategy costs, in rounds of the first one, in batches like `state`, which is donated; it
    comes back as it was, up to cache entries that no token has."""
    kept = jax.tree.map(jnp.copy, _without_caches(state))

    def restore() -> None:
        nonlocal state
        fresh = jax.tree.map(jnp.copy, kept)
        draft = None if kept.draft is None else fresh.draft._replace(cache=state.draft.cache)
        state = jax.block_until_ready(fresh._replace(cache=state.cache, draft=draft))

    def run(strategy: Strategy) -> None:
        nonlocal state
        for _ in range(_ROUNDS):
            state, committed = speculate(models, strategy, weights, state)
        jax.device_get(committed)

    costs = compare_each(run, strategies, restore)
    restore()
    return costs, state


def _without_caches(state: State) -> State:
    return state._replace(cache=(), draft=None if state.draft is None else state.draft._replace(cache=()))


def cost_key(target: Target, draft: Draft, batch: int, variant: Sequence[str]) -> dict[str, Any]:
    """What costs depend on beside the strategy and the length of the caches. Of the models their shapes, so that a
    draft trained further needs no new measurement.

    variant: what else tells programs apart, such as the settings of sampling in use.
    """
    return {
        "target": _hash(repr(target.config)),
        "draft": _hash(repr(draft.config)),
        "dtypes": [str(target.dtype), str(draft.dtype)],
        "quantize": target.quantize,
        "mesh": target.placement.words,
        "machine": describe_machine(),
        "versions": {name: metadata.version(name) for name in ("eagle3-jax", "jax", "jaxlib")},
        "batch": 1 << (batch - 1).bit_length(),
        "variant": list(variant),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cost_folder(key: dict[str, Any]) -> Path:
    """Where the costs of a key are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "eagle3_jax" / "costs" / _hash(json.dumps(key, sort_keys=True))


def _name(strategy: Strategy) -> str:
    return re.sub(r"\W+", "_", strategy.text)


def _nearest(known: dict[Strategy, dict[int, float]], entries: int) -> Costs:
    """The costs at the nearest length of the caches that is near enough."""

    def times(length: int) -> float:
        return max(length, entries) / min(length, entries)

    nearest = {strategy: min(lengths, key=times) for strategy, lengths in known.items()}
    return {strategy: known[strategy][at] for strategy, at in nearest.items() if times(at) <= _NEAR}


def _read(folder: Path, key: dict[str, Any], strategies: Sequence[Strategy]) -> dict[Strategy, dict[int, float]]:
    """The costs kept of these strategies, by length of the caches; files that are damaged or of another key are told
    and left out."""
    known, useless = {}, []
    for strategy in strategies:
        for path in folder.glob(f"*-{_name(strategy)}.json"):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                of, entries, cost = content["key"], content["entries"], float(content["plain_rounds"])
                usable = of == key and content["strategy"] == strategy.text and type(entries) is int and entries > 0
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                usable = False
            if usable and math.isfinite(cost) and cost > 0:
                known.setdefault(strategy, {})[entries] = cost
            else:
                useless.append(path.name)
    if useless:
        _log.warning("note: ignoring files of round costs, damaged or of something else: %s in %s", useless, folder)
    return known


def _write(folder: Path, key: dict[str, Any], entries: int, costs: Costs) -> None:
    for strategy, cost in costs.items():
        path = folder / f"{entries}-{_name(strategy)}.json"
        content = {"key": key, "strategy": strategy.text, "entries": entries, "plain_rounds": cost}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            _log.warning("note: cannot keep the measured round costs: %s: %s", folder, error.strerror or error)
            return

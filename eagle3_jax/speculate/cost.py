"""What a round of each strategy costs on this device with this pair: measured once, then read from a file.

The files are ~/.cache/eagle3_jax/costs/*.json (or below XDG_CACHE_HOME), one for each pair of models, device, jax
version, batch size (the next power of two), cache length and kind of sampling. Any of them may be deleted.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.bench.machine import describe_machine
from eagle3_jax.draft.draft import Draft
from eagle3_jax.files import write_whole
from eagle3_jax.models.target import Target
from eagle3_jax.speculate.round import Models, State, Weights, speculate
from eagle3_jax.speculate.strategy import Strategy

_TURNS, _ROUNDS = 10, 2
_log = logging.getLogger(__name__)


def known_costs(
    key: dict[str, Any], strategies: Sequence[Strategy], measure: Callable[[], dict[Strategy, float]]
) -> dict[Strategy, float]:
    """Seconds a round of each strategy, from the file of `key`, or by `measure`, and then the file is written.

    A file that cannot be used or written is logged and otherwise ignored.
    """
    path = cost_file(key)
    costs = _read(path, key, strategies)
    if costs is None:
        _log.warning("note: measuring what rounds cost here at batch %d (once, kept in %s)", key["batch"], path)
        costs = measure()
        _write(path, key, costs)
    return costs


def time_each(
    run: Callable[[Strategy], None], strategies: Sequence[Strategy], prepare: Callable[[], None] = lambda: None
) -> dict[Strategy, float]:
    """The fewest seconds of run(strategy), strategies taking turns, so that what else the machine does counts little. A
    first turn, which compiles, is not counted, nor is `prepare` before each run."""
    seconds = dict.fromkeys(strategies, math.inf)
    for turn in range(1 + _TURNS):
        for strategy in strategies:
            prepare()
            begin = time.perf_counter()
            run(strategy)
            if turn:
                seconds[strategy] = min(seconds[strategy], time.perf_counter() - begin)
    return seconds


def measure_rounds(
    models: Models, weights: Weights, strategies: Sequence[Strategy], state: State
) -> tuple[dict[Strategy, float], State]:
    """Seconds a round of each strategy in batches like `state`, which is donated; it comes back as it was, up to cache
    entries that no token has."""
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

    seconds = time_each(run, strategies, restore)
    restore()
    return {strategy: total / _ROUNDS for strategy, total in seconds.items()}, state


def _without_caches(state: State) -> State:
    return state._replace(cache=(), draft=None if state.draft is None else state.draft._replace(cache=()))


def cost_key(target: Target, draft: Draft, batch: int, entries: int, variant: Sequence[str]) -> dict[str, Any]:
    """What costs depend on. Of the models their shapes, so that a draft trained further needs no new measurement.

    entries: length of the caches. variant: what else tells programs apart, such as the settings of sampling in use.
    """
    return {
        "target": _hash(target.config),
        "draft": _hash(draft.config),
        "dtypes": [str(target.dtype), str(draft.dtype)],
        "quantize": target.quantize,
        "mesh": target.placement.words,
        "machine": describe_machine(),
        "versions": {name: metadata.version(name) for name in ("eagle3-jax", "jax", "jaxlib")},
        "batch": 1 << (batch - 1).bit_length(),
        "entries": entries,
        "variant": list(variant),
    }


def _hash(config: Any) -> str:
    return hashlib.sha256(repr(config).encode()).hexdigest()[:16]


def cost_file(key: dict[str, Any]) -> Path:
    """Where the costs of a key are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return Path(root) / "eagle3_jax" / "costs" / f"{name}.json"


def _read(path: Path, key: dict[str, Any], strategies: Sequence[Strategy]) -> dict[Strategy, float] | None:
    """The costs of a file; None if there is none, or if it is damaged, of another key, or lacks a strategy."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        seconds = {s: float(content["seconds"][s.text]) for s in strategies}
        if content["key"] == key and all(math.isfinite(cost) and cost > 0 for cost in seconds.values()):
            return seconds
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    _log.warning("note: ignoring the file of round costs, it is damaged or of something else: %s", path)
    return None


def _write(path: Path, key: dict[str, Any], costs: dict[Strategy, float]) -> None:
    content = {"key": key, "seconds": {strategy.text: cost for strategy, cost in costs.items()}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        _log.warning("note: cannot keep the measured round costs: %s: %s", path, error.strerror or error)

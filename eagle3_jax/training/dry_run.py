"""`train --dry-run`: what a run would take, without beginning it: parameters, memory, disk, steps, time.

Memory of a device is the compiled step's own account (its arguments and the temporaries XLA has planned), that of the
process is measured.
"""

import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from eagle3_jax.config import Config
from eagle3_jax.models.target import Target
from eagle3_jax.training.budget import Budget
from eagle3_jax.training.dataset import make_batch, rows_of_step, steps_an_epoch
from eagle3_jax.training.prepare import Run, checkpoint_bytes, load, trained_parts
from eagle3_jax.training.step import compute_features, evaluate_batch, train_step
from eagle3_jax.training.trainer import features_of, fresh_state, on_devices


def dry_run(config: Config, target: Target | None, init_from: str | None, say) -> dict[str, Any]:
    """Loads everything, compiles the step, times two, and returns the figures. Writes nothing.

    Raises what `trainer.train` would raise on bad configs or data.
    """
    run = load(config, target, init_from, say)
    training, rows = config.training, len(run.train.input_ids)
    chosen = rows_of_step(0, rows, training.batch_rows, training.seed)
    batch = make_batch(run.train, chosen, training.batch_rows)
    batch = on_devices(run, batch)
    features = features_of(run, run.stored, run.cache, chosen, batch)
    state = fresh_state(run)
    rate = jnp.float32(1.0)
    say("compiling the step")
    compiled = train_step.lower(run.setup, run.frozen, state, batch, features, rate).compile()
    memory = compiled.memory_analysis()
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        state, outcome = compiled(run.frozen, state, batch, features, rate)
        jax.block_until_ready(outcome)
        seconds.append(time.perf_counter() - begin)
    target_pass = _timed(lambda: compute_features(run.setup, run.frozen, batch)) if features is not None else 0.0
    evaluation = _timed(lambda: evaluate_batch(_evaluating(run), run.frozen, state.weights, batch, features))
    checkpoint, export = checkpoint_bytes(run), _bytes(run.draft.params, jnp.dtype(config.target.dtype).itemsize)
    return {
        "parameters": {
            "target": _count(run.target.params),
            "draft_trained": _count(trained_parts(run)),
            "draft_frozen": _count(run.frozen.draft),
        },
        "memory_per_device": _memory(run, memory, features),
        "memory_of_process": _resident(),
        "disk": {
            "checkpoint": checkpoint,
            "checkpoints": (training.keep_checkpoints + 2) * checkpoint,
            "export": export,
        },
        "tokens": {
            "rows": rows,
            "row_length": config.data.length,
            "in_rows": int((run.train.document_ids >= 0).sum()),
            "supervised": run.train.report.supervised_tokens,
        },
        "time": _time(run, min(seconds), target_pass, evaluation),
    }


def _evaluating(run: Run):
    return run.setup._replace(steps=run.config.training.evaluate_steps)


def _timed(action) -> float:
    """Seconds of an action, once it is compiled."""
    jax.block_until_ready(action())
    begin = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - begin


def _memory(run: Run, memory: Any, features: Any) -> dict[str, int]:
    """Bytes a device: what the step reads, what it needs besides, and kept features if they are in its memory."""
    per_row = 0 if features is None else sum(a.nbytes for a in jax.tree.leaves(features)) // len(features.argmax)
    kept = per_row * (len(run.train.input_ids) + len(run.heldout.input_ids))
    ram = run.config.training.features == "ram"
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "peak": memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "features_in_host_memory": kept if ram else 0,
    }


def _resident() -> int:
    """The most memory that this process has had, bytes: programs, compiling and, on a CPU, what the device has."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _time(run: Run, step: float, target_pass: float, evaluation: float) -> dict[str, Any]:
    """Steps of the run and its expected seconds. target_pass: of the target where it is not in the step already."""
    training = run.config.training
    pass_steps = steps_an_epoch(run.train, training.batch_rows)
    limit = None if training.minutes is None else 60 * training.minutes
    budget, kept = Budget(training.epochs, pass_steps, limit), run.stored is None and training.features == "ram"
    first = step + (target_pass if kept else 0.0)
    budget.observe(0, first, first - step)
    steps = round(budget.total(1, first))
    seconds = steps * step + min(steps, pass_steps) * (first - step)
    evaluations = max(steps // training.evaluate_every, 1) * steps_an_epoch(run.heldout, training.batch_rows)
    return {
        "steps": steps,
        "steps_a_pass": pass_steps,
        "seconds_a_step": step,
        "tokens_per_second": training.batch_rows * run.config.data.length * run.train.report.fill_rate / step,
        "seconds": seconds + evaluations * evaluation,
    }


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _bytes(params: Any, size: int) -> int:
    return _count(params) * size


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures in words."""
    p, m, d, t, run = (figures[k] for k in ("parameters", "memory_per_device", "disk", "tokens", "time"))
    giga = 1e9
    ram = m["features_in_host_memory"]
    return [
        f"parameters: {p['draft_trained']:,} trained, {p['draft_frozen']:,} frozen, target {p['target']:,}",
        f"data: {t['rows']:,} rows of {t['row_length']}, {t['in_rows']:,} tokens, {t['supervised']:,} supervised",
        f"memory per device: {m['peak'] / giga:.2f} GB at a step's peak ({m['arguments'] / giga:.2f} held, "
        f"{m['temporaries'] / giga:.2f} temporary)" + (f"; {ram / giga:.2f} GB of features in RAM" if ram else ""),
        f"memory of this process: {figures['memory_of_process'] / giga:.2f} GB at most, with compiling and two steps",
        f"disk: {d['checkpoints'] / giga:.2f} GB of checkpoints ({d['checkpoint'] / giga:.2f} each), "
        f"{d['export'] / giga:.2f} GB export",
        f"time: {run['steps']:,} steps of {run['seconds_a_step']:.3f} s, {run['tokens_per_second']:,.0f} tok/s; "
        f"about {run['seconds'] / 60:.1f} minutes with evaluation",
    ]

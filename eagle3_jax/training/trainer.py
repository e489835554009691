"""`train`: config to runs/NAME/{config.yaml, provenance.json, metrics.jsonl, checkpoints/, export/, result.json}.

Prepared by training.prepare; then start (a fresh state or the newest checkpoint's), loop (steps, evaluation,
checkpoints), finish (export of the best state, result.json).
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import Config
from eagle3_jax.draft.draft import Draft, save_draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target
from eagle3_jax.sharding import ONE_DEVICE, any_process, from_main, is_main, sync
from eagle3_jax.training import run_folder
from eagle3_jax.training.budget import Budget
from eagle3_jax.training.dataset import (
    batches_in_order,
    make_batch,
    rows_of_pass,
    rows_of_step,
    steps_an_epoch,
)
from eagle3_jax.training.features import FeatureCache
from eagle3_jax.training.interrupt import deferred_interrupt
from eagle3_jax.training.measured import measure_generation
from eagle3_jax.training.metrics import AcceptanceMeter, Breakdown, bucket
from eagle3_jax.training.optimiser import learning_rate_factor
from eagle3_jax.training.prepare import Run, prepare, trained_parts
from eagle3_jax.training.report import write_report
from eagle3_jax.training.report.samples import sample_answers
from eagle3_jax.training.step import (
    Batch,
    TrainState,
    complete_features,
    compute_features,
    evaluate_batch,
    train_step,
)
from eagle3_jax.training.stored import StoredFeatures
from eagle3_jax.training.trackers import open_trackers


@dataclass(frozen=True)
class Report:
    """What the loop tells a progress display after each step."""

    step: int
    progress: float
    seconds_left: float
    metrics: dict[str, Any]
    heldout: dict[str, Any] | None


def train(
    config: Config,
    resume: bool = False,
    init_from: str | None = None,
    target: Target | None = None,
    progress: Callable[[Report], None] = lambda report: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Trains a draft and returns result.json's content.

    resume: go on from the newest checkpoint of runs/NAME (a finished run returns its result at once). init_from: start
    from the weights and vocabulary map of a draft folder, which a resumed run does again without being told. Ctrl-C or
    SIGTERM ends the step at hand, saves a checkpoint and raises KeyboardInterrupt; a second one is obeyed at once.
    Raises UserError on bad configs or data, WiringError on taps that disagree.
    """
    folder = config.run_dir
    if not is_main():
        say, progress = (lambda line: None), (lambda report: None)
    finished = run_folder.check(folder, config, resume, say)
    if finished is not None:
        return finished
    if is_main():
        run_folder.refuse_busy(folder)
    run = prepare(config, folder, target, run_folder.init_from(folder, init_from), say)
    try:
        state, budget, seconds = _start(run, say)
        if resume and run.checkpoints.latest is None:
            say("there is no checkpoint to go on from: training begins at step 0")
        state, heldout = _loop(run, state, budget, seconds, folder, progress)
        return _finish(run, state, budget, folder, heldout, say)
    finally:
        run.checkpoints.close()
        run.held.close()


def fresh_state(run: Run) -> TrainState:
    """The state that training begins from: float32 masters, moments of zero.

    It is bound to its devices, as what a checkpoint gives is: otherwise the step would be compiled anew on resuming.
    """
    # Copies: some weights begin as the target's own arrays, and the step takes its state's memory over.
    trainable = jax.tree.map(lambda p: jnp.array(p, jnp.float32), trained_parts(run))
    average = None if run.setup.ema is None else jax.tree.map(jnp.array, trainable)
    state = TrainState(trainable, run.setup.optimiser.init(trainable), jnp.zeros((), jnp.int32), average)
    placement = run.setup.placement
    return jax.device_put(state, jax.devices()[0]) if placement.mesh is None else placement.weights(state)


def _start(run: Run, say) -> tuple[TrainState, Budget, float]:
    """Fresh or the newest checkpoint's: the state to train from, the budget, the seconds of training behind it."""
    state = fresh_state(run)
    training, extra = run.config.training, {"seconds": 0.0, "pass_steps": None, "expected": None}
    if run.checkpoints.latest is not None:
        state, extra, step = run.checkpoints.restore(state)
    limit = None if training.minutes is None else 60 * training.minutes
    all_steps = steps_an_epoch(run.train, training.batch_rows)
    budget = Budget(training.epochs, all_steps, limit, extra["pass_steps"], extra["expected"])
    if run.checkpoints.latest is not None:
        say(f"resuming at step {step} of {budget.total(step, extra['seconds']):.0f}")
    return state, budget, extra["seconds"]


def _loop(
    run: Run, state: TrainState, budget: Budget, spent: float, folder: Path, progress
) -> tuple[TrainState, dict[str, Any]]:
    """Steps until the budget is used up. spent: seconds of training before this call. Of several processes the first
    one's clock decides for all."""
    training, rows = run.config.training, len(run.train.input_ids)
    first = step = int(state.step)
    metrics_file = run_folder.Metrics(folder / "metrics.jsonl" if is_main() else None, step)
    began, heldout = time.perf_counter() - spent, None
    with deferred_interrupt() as interrupted, open_trackers(run.config, first) as trackers:

        def stop_if_asked() -> None:
            if any_process(interrupted.is_set()):
                run.checkpoints.save(step, state, _extra(budget, total, None, time.perf_counter() - began), None)
                raise KeyboardInterrupt(f"stopped at step {step} of {total:.0f} / {folder} / --resume goes on")

        while step < (total := budget.total(step, *from_main(time.perf_counter() - began))):
            stop_if_asked()
            begin = time.perf_counter()
            chosen = rows_of_step(step, rows, training.batch_rows, training.seed, budget.pass_steps)
            batch = make_batch(run.train, chosen, training.batch_rows)
            placed = on_devices(run, batch)
            wait = time.perf_counter() - begin
            features = features_of(run, run.stored, run.cache, chosen, placed)
            if run.stored is not None:  # the time went into reading them
                wait = time.perf_counter() - begin
            # Only what is kept is for the first pass alone.
            of_features = time.perf_counter() - begin if training.features == "ram" else 0.0
            rate = jnp.float32(learning_rate_factor(run.config.optimiser, step / total))
            state, outcome = train_step(run.setup, run.frozen, state, placed, features, rate)
            metrics = _step_metrics(run, budget, step, outcome, batch) | {
                "learning_rate": float(rate) * run.config.optimiser.learning_rate
            }
            if broken := [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]:
                cause = "begin another run at a lower learning rate" if step else "target or data are not finite"
                raise UserError(f"{broken[0]} is {metrics[broken[0]]} at step {step} / {folder} / {cause}")
            now = time.perf_counter()
            seconds, of_features, elapsed = from_main(now - begin, of_features, now - began)
            if step > first:
                budget.observe(step, seconds, of_features)
            step += 1
            total = budget.total(step, elapsed)
            heldout = evaluate(run, state) if step >= total or step % training.evaluate_every == 0 else None
            metrics["seconds"], metrics["wait"] = round(seconds, 4), round(wait, 4)
            metrics["tokens"] = int((batch.document_ids >= 0).sum())
            metrics["tokens_per_second"] = round(metrics["tokens"] / seconds, 1)
            metrics_file.write(metrics if heldout is None else {**metrics, "heldout": heldout})
            trackers.log(step, metrics, heldout)
            elapsed = time.perf_counter() - began
            try:
                left = budget.seconds_left(step, elapsed)
                progress(Report(step, min(step / total, 1.0), left, metrics, heldout))
            except KeyboardInterrupt:  # a display's way of asking
                interrupted.set()
            tau = None if heldout is None else heldout["simulated_tau"]
            better = tau is not None and tau > run.checkpoints.best_tau
            if better or step >= total or step % training.checkpoint_every == 0:
                run.checkpoints.save(step, state, _extra(budget, total, heldout, elapsed), tau)
        heldout = heldout or evaluate(run, state)
        stop_if_asked()
        return state, heldout


def _extra(budget: Budget, total: float, heldout: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    """What a checkpoint keeps beside the arrays."""
    decided = budget.pass_steps if budget.pass_steps < budget.all_steps else None
    return {"heldout": heldout, "seconds": seconds, "pass_steps": decided, "expected": total}


def features_of(run: Run, stored: StoredFeatures | None, cache: FeatureCache, rows: list[int], batch):
    """None for online features; otherwise what is stored, or with `ram` kept, read or computed on first use."""
    keep = run.config.training.features == "ram"
    if stored is None and not keep:
        return None
    rows, placement = rows + [-1] * (run.config.training.batch_rows - len(rows)), run.setup.placement
    if keep and cache.has(rows):
        return placement.batch(cache.get(placement.own(rows)), len(rows))
    if stored is None:
        features = compute_features(run.setup, run.frozen, batch)
    else:
        states = placement.batch(stored.rows(placement.own(rows)), len(rows))
        features = complete_features(run.setup, run.frozen, batch, *states)
    if keep:
        cache.put(rows, features)
    return features


def on_devices(run: Run, batch: Batch) -> Batch:
    """A batch where the step wants it; each process hands over its own rows."""
    placement = run.setup.placement
    return placement.batch(jax.tree.map(placement.own, batch), len(batch.ids))


def _step_metrics(run: Run, budget: Budget, step: int, outcome, batch) -> dict[str, Any]:
    meter = AcceptanceMeter(run.config.training.ttt_steps)
    meter.add_batch(outcome, batch)
    return {
        "step": step + 1,
        "epoch": round((step + 1) / budget.pass_steps, 3),
        "loss": float(outcome.loss),
        "loss_by_step": np.asarray(outcome.losses).round(5).tolist(),
        "grad_norm": float(outcome.grad_norm),
        **meter.summary(),
    }


def evaluate(run: Run, state: TrainState) -> dict[str, Any]:
    """Loss and acceptance on all held-out rows, with `evaluate_steps` draft steps; tau also by source and by place."""
    training = run.config.training
    setup = run.setup._replace(steps=training.evaluate_steps)
    meter, losses = AcceptanceMeter(training.evaluate_steps), []
    by_source, by_position = Breakdown(), Breakdown()
    for rows, batch in batches_in_order(run.heldout, training.batch_rows):
        placed = on_devices(run, batch)
        features = features_of(run, run.heldout_stored, run.heldout_cache, rows, placed)
        outcome = evaluate_batch(setup, run.frozen, state.weights, placed, features)
        for answer in meter.add_batch(outcome, batch):
            source = run.heldout_documents.sources[run.heldout.members[rows[answer.row]][answer.document]]
            start = int(np.argmax(batch.document_ids[answer.row] == answer.document))
            for slot, accepted in zip(answer.slots, answer.accepted, strict=True):
                by_source.add(source, accepted)
                by_position.add(bucket(slot - start), accepted)
        losses.append((float(outcome.losses[0]), int(np.asarray(outcome.counts.total)[0])))
    weight = max(sum(count for _, count in losses), 1)
    return {
        "loss_first_step": sum(loss * count for loss, count in losses) / weight,
        **meter.summary(),
        "by_source": by_source.summary(),
        "by_position": by_position.summary(),
    }


def _finish(run: Run, state: TrainState, budget: Budget, folder: Path, heldout: dict[str, Any], say) -> dict[str, Any]:
    """Exports the checkpoint with the best held-out tau and writes result.json, in that order."""
    best, step = run.checkpoints.best_step(), int(state.step)
    total = step
    if best is not None and best != step:
        candidate, extra, _ = run.checkpoints.restore(state, best)
        if extra["heldout"]["simulated_tau"] > heldout["simulated_tau"]:
            state, heldout, step = candidate, extra["heldout"], best
    params = run.setup.placement.gathered({**state.weights, **run.frozen.draft})
    dtype = jnp.dtype(run.config.target.dtype)
    trained = {"step": step, "ttt_steps": run.config.training.ttt_steps}
    trained |= {key: value for key, value in heldout.items() if not isinstance(value, dict)}
    if run.config.data.chat_template:
        trained["chat_template"] = run.config.data.chat_template  # serving must render chats with the same
    facts = {**run.draft.facts, "training": trained}
    params = jax.tree.map(lambda p: jnp.asarray(np.asarray(p), dtype), params)
    draft = Draft(run.draft.config, run.draft.graph, params, run.draft.d2t, facts)
    if is_main():
        save_draft(draft, folder / "export", run.config.training.ttt_steps)
    samples = _samples(run, state)
    if is_main():
        run_folder.write_json(folder / "samples.json", samples)
    say(f"draft written to {folder / 'export'} (step {step}, held-out simulated tau {heldout['simulated_tau']:.3f})")
    rows, batch_rows, seed = len(run.train.input_ids), run.config.training.batch_rows, run.config.training.seed
    used = rows_of_pass(0, rows, batch_rows, seed, budget.pass_steps)
    result = {
        "name": run.config.name,
        "step": step,
        "total_steps": total,
        "taps": list(run.draft.taps),
        "heldout": heldout,
        "passes": run.config.training.epochs,
        "supervised_tokens": int(run.train.loss_mask[used].sum()),
        "export": str(folder / "export"),
    }
    generation = _generate(run, draft, say) if is_main() else None
    if generation is not None:
        result["generation"] = generation
        say(f"tau {generation['tau']:.3f} when generating, {generation['simulated_tau']:.3f} simulated on its answers")
    if is_main():
        run_folder.write_json(folder / "result.json", result)
        say(f"report: {write_report(folder)}")
    sync("finished")
    return result


def _generate(run: Run, draft: Draft, say) -> dict[str, Any] | None:
    """Real generation with the draft, by one process where there are several; None without prompts or room."""
    params, placement = run.frozen.target, run.setup.placement  # on the devices of training
    if jax.process_count() > 1:  # which only all together could use
        device, size = jax.local_devices()[0], sum(leaf.nbytes for leaf in jax.tree.leaves(run.target.params))
        memory = device.memory_stats()
        free = math.inf if memory is None else memory["bytes_limit"] - memory["bytes_in_use"]
        if 1.2 * size > free:
            say(
                f"no answers generated: a device has {free / 1e9:.1f} GB beside training, the whole target is "
                f"{size / 1e9:.1f} GB / eagle3 bench measures the draft"
            )
            return None
        params, placement = jax.device_put(run.target.params, device), ONE_DEVICE
    target = dataclasses.replace(run.target, params=params, placement=placement)
    return measure_generation(run.config.evaluation, target, draft, run.prompts, say)


def _samples(run: Run, state: TrainState) -> list[dict[str, Any]]:
    """Some held-out answers with the draft's share in them, for the report."""
    setup = run.setup._replace(steps=run.config.training.evaluate_steps)

    def hits_of(rows, batch) -> np.ndarray:
        placed = on_devices(run, batch)
        features = features_of(run, run.heldout_stored, run.heldout_cache, rows, placed)
        return np.asarray(evaluate_batch(setup, run.frozen, state.weights, placed, features).hits)

    return sample_answers(run.heldout, hits_of, run.config.training.batch_rows, run.target.tokenizer)

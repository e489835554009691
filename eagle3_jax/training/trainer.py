"""`train`: config to runs/NAME/{config.yaml, provenance.json, metrics.jsonl, checkpoints/, export/, result.json}.

The order of reading is the order of the file: prepare (target, documents, draft), loop (steps, evaluation,
checkpoints), finish (export of the best state, result.json).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import Config
from eagle3_jax.data.packing import Packed
from eagle3_jax.data.template import ChatOptions
from eagle3_jax.data.vocabulary import coverage, draft_vocabulary
from eagle3_jax.draft.draft import Draft, load_draft, save_draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target, load_target
from eagle3_jax.taps import require
from eagle3_jax.training import run_folder
from eagle3_jax.training.budget import Budget
from eagle3_jax.training.checkpoints import Checkpoints, wiring_facts
from eagle3_jax.training.dataset import (
    Documents,
    batches_in_order,
    data_warnings,
    make_batch,
    pack_documents,
    read_documents,
    rows_of_step,
    steps_an_epoch,
)
from eagle3_jax.training.features import FeatureCache
from eagle3_jax.training.initialise import draft_config, initial_draft
from eagle3_jax.training.interrupt import deferred_interrupt
from eagle3_jax.training.metrics import AcceptanceMeter
from eagle3_jax.training.optimiser import learning_rate_factor, make_optimiser
from eagle3_jax.training.step import (
    Frozen,
    Setup,
    TrainState,
    complete_features,
    compute_features,
    evaluate_batch,
    train_step,
)
from eagle3_jax.training.stored import StoredFeatures


@dataclass(frozen=True)
class Report:
    """What the loop tells a progress display after each step."""

    step: int
    progress: float
    seconds_left: float
    metrics: dict[str, Any]
    heldout: dict[str, Any] | None


@dataclass
class Run:
    """Everything the loop needs, prepared."""

    config: Config
    target: Target
    draft: Draft
    train: Packed
    heldout: Packed
    setup: Setup
    frozen: Frozen
    checkpoints: Checkpoints
    stored: StoredFeatures | None = None
    heldout_stored: StoredFeatures | None = None
    cache: FeatureCache = field(default_factory=FeatureCache)
    heldout_cache: FeatureCache = field(default_factory=FeatureCache)


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
    from the weights and vocabulary map of a draft folder. Ctrl-C ends the step at hand, saves a checkpoint and raises
    KeyboardInterrupt; a second one raises it at once.
    Raises UserError on bad configs or data, WiringError on taps that disagree.
    """
    folder = config.run_dir
    finished = run_folder.check(folder, config, resume)
    if finished is not None:
        return finished
    run = prepare(config, folder, target, init_from, say)
    try:
        state, budget, seconds = _start(run, say)
        state, heldout = _loop(run, state, budget, seconds, folder, progress)
        return _finish(run, state, budget, folder, heldout, say)
    finally:
        run.checkpoints.close()


def prepare(config: Config, folder: Path, target: Target | None, init_from: str | None, say) -> Run:
    """Loads the target, reads and packs the data, makes the first draft; then, nothing being wrong, the run folder."""
    target = load_target(config.target.path, config.target.dtype) if target is None else target
    (documents, packed), (heldout_documents, heldout) = (
        _read(config, files, target) for files in (config.data.train, config.data.heldout)
    )
    draft = _first_draft(config, target, documents.items, init_from)
    say(f"taps: {draft.taps.words(target.num_layers)}, joined in this order")
    stored, heldout_stored = (
        _stored(config, draft, target, *data, say) for data in ((documents, packed), (heldout_documents, heldout))
    )
    report = packed.report
    say(
        f"data: {report.documents} documents in {report.rows} rows of {config.data.length}, "
        f"{report.supervised_tokens} supervised tokens; {report.cut_documents} documents cut, "
        f"{report.overlong_documents} too long, {report.dropped_documents - report.overlong_documents} with nothing "
        f"supervised, {documents.words()}; "
        f"the draft vocabulary covers {coverage(heldout_documents.items, draft.d2t):.1%} of held-out tokens"
    )
    for warning in data_warnings(documents, packed, heldout_documents):
        say(f"warning: {warning}")
    setup = Setup(
        target.graph,
        draft.graph,
        draft.taps,
        make_optimiser(config.optimiser),
        config.training.ttt_steps,
        config.training.step_decay,
        config.training.feature_loss,
        config.training.compute_dtype,
    )
    kept = {key: draft.params[key] for key in frozen_parts(config) if key in draft.params}
    frozen = Frozen(target.params, kept, jnp.asarray(draft.d2t))
    facts = wiring_facts(draft, target.fingerprint, packed, heldout)
    run_folder.begin(folder, config)
    checkpoints = Checkpoints(folder / "checkpoints", facts)
    if checkpoints.latest is None:
        run_folder.write_provenance(folder, config, target, packed, documents)
    if draft.facts["verifier"]["name_or_path"] is None:
        say("warning: the export will name no verifier, so servers must be told it / set training.target_hub_id")
    return Run(config, target, draft, packed, heldout, setup, frozen, checkpoints, stored, heldout_stored)


def _read(config: Config, files: str | list[str], target: Target) -> tuple[Documents, Packed]:
    """Documents of the training or the held-out files, and their rows."""
    data = config.data
    options = ChatOptions(data.last_turn_only, data.chat_template)
    documents = read_documents(files, target, data.stored.loss_masks, options, data.duplicates == "drop")
    return documents, pack_documents(documents.items, data.length, files, data.overlong == "drop")


def _stored(config: Config, draft: Draft, target: Target, documents: Documents, packed: Packed, say):
    """The stored features of documents that have some, checked; None for those the target runs over."""
    if documents.samples is None:
        return None
    stored = StoredFeatures(documents.samples, packed, config.data.stored, draft.taps, target)
    if config.training.feature_loss and stored.states.normed:
        raise UserError(
            "training.feature_loss compares with the last hidden state before the final norm, the stored one is after "
            "it / set training.feature_loss to 0"
        )
    say(stored.words())
    return stored


def frozen_parts(config: Config) -> tuple[str, ...]:
    """Top-level parameters of the draft that stay as they began."""
    frozen = ("embed_tokens", "target_norm")  # the target's own, as far as a draft has them
    return frozen if config.training.train_head else (*frozen, "lm_head")


def _first_draft(config: Config, target: Target, documents, init_from: str | None) -> Draft:
    facts = {
        "verifier": {
            "name_or_path": config.training.target_hub_id or target.hub_id,
            "architectures": [target.architecture],
        },
        "target": {
            "hub_id": config.training.target_hub_id or target.hub_id,
            "fingerprint": target.fingerprint,
            "tokenizer_fingerprint": target.tokenizer_fingerprint,
        },
    }
    if init_from is not None:
        draft = load_draft(init_from, "float32", target=target)
        wanted = draft_config(config.draft, target)
        require(draft.taps, wanted.taps)
        differing = [name for name, value in vars(wanted).items() if vars(draft.config)[name] != value]
        if differing:
            raise UserError(f"--init-from {init_from} differs from the config's draft in {', '.join(differing)}")
        return Draft(draft.config, draft.graph, draft.params, draft.d2t, facts)
    size = min(config.draft.vocab_size, target.config.vocab_size)
    d2t = draft_vocabulary(documents, size, target.config.vocab_size, always=target.eos_token_ids)
    return initial_draft(config.draft, target, d2t, config.training.seed, facts)


def _start(run: Run, say) -> tuple[TrainState, Budget, float]:
    """Fresh or the newest checkpoint's: the state to train from, the budget, the seconds of training behind it."""
    trainable = {key: value for key, value in run.draft.params.items() if key not in run.frozen.draft}
    # Copies: some weights begin as the target's own arrays, and the step takes its state's memory over.
    trainable = jax.tree.map(lambda p: jnp.array(p, jnp.float32), trainable)
    state = TrainState(trainable, run.setup.optimiser.init(trainable), jnp.zeros((), jnp.int32))
    training, extra = run.config.training, {"seconds": 0.0, "pass_steps": None, "expected": None}
    if run.checkpoints.latest is not None:
        state, extra, step = run.checkpoints.restore(state)
        state = jax.tree.map(jnp.asarray, state)
    limit = None if training.minutes is None else 60 * training.minutes
    all_steps = steps_an_epoch(run.train, training.batch_rows)
    budget = Budget(training.epochs, all_steps, limit, extra["pass_steps"], extra["expected"])
    if run.checkpoints.latest is not None:
        say(f"resuming at step {step} of {budget.total(step, extra['seconds']):.0f}")
    return state, budget, extra["seconds"]


def _loop(
    run: Run, state: TrainState, budget: Budget, spent: float, folder: Path, progress
) -> tuple[TrainState, dict[str, Any]]:
    """Steps until the budget is used up. spent: seconds of training before this call."""
    training, rows = run.config.training, len(run.train.input_ids)
    first = step = int(state.step)
    metrics_file = run_folder.Metrics(folder / "metrics.jsonl", step)
    began, heldout = time.perf_counter() - spent, None
    with deferred_interrupt() as interrupted:
        while step < (total := budget.total(step, time.perf_counter() - began)):
            if interrupted.is_set():
                run.checkpoints.save(step, state, _extra(budget, total, None, time.perf_counter() - began), None)
                raise KeyboardInterrupt(f"stopped at step {step} of {total:.0f} / {folder} / --resume goes on")
            begin = time.perf_counter()
            chosen = rows_of_step(step, rows, training.batch_rows, training.seed, budget.pass_steps)
            batch = make_batch(run.train, chosen, training.batch_rows)
            features = _features(run, run.stored, run.cache, chosen, batch)
            # Only what is kept is for the first pass alone.
            of_features = time.perf_counter() - begin if training.features == "ram" else 0.0
            rate = jnp.float32(learning_rate_factor(run.config.optimiser, step / total))
            state, outcome = train_step(run.setup, run.frozen, state, batch, features, rate)
            metrics = _step_metrics(run, budget, step, outcome, batch)
            if not math.isfinite(metrics["loss"]):
                raise UserError(
                    f"loss is {metrics['loss']} at step {step} / {folder} / lower the learning rate, --resume"
                )
            seconds = time.perf_counter() - begin
            if step > first:
                budget.observe(step, seconds, of_features)
            step += 1
            total = budget.total(step, time.perf_counter() - began)
            heldout = evaluate(run, state) if step >= total or step % training.evaluate_every == 0 else None
            metrics["seconds"] = round(seconds, 4)
            metrics["tokens_per_second"] = round(float((batch.document_ids >= 0).sum()) / seconds, 1)
            metrics_file.write(metrics if heldout is None else {**metrics, "heldout": heldout})
            elapsed = time.perf_counter() - began
            try:
                left = budget.seconds_left(step, elapsed)
                progress(Report(step, min(step / total, 1.0), left, metrics, heldout))
            except KeyboardInterrupt:  # a display's way of asking
                interrupted.set()
            if step >= total or step % training.checkpoint_every == 0:
                tau = None if heldout is None else heldout["simulated_tau"]
                run.checkpoints.save(step, state, _extra(budget, total, heldout, elapsed), tau)
        return state, heldout or evaluate(run, state)


def _extra(budget: Budget, total: float, heldout: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    """What a checkpoint keeps beside the arrays."""
    decided = budget.pass_steps if budget.pass_steps < budget.all_steps else None
    return {"heldout": heldout, "seconds": seconds, "pass_steps": decided, "expected": total}


def _features(run: Run, stored: StoredFeatures | None, cache: FeatureCache, rows: list[int], batch):
    """None for online features; otherwise what is stored, or with `ram` kept, read or computed on first use."""
    keep = run.config.training.features == "ram"
    if stored is None and not keep:
        return None
    rows = rows + [-1] * (run.config.training.batch_rows - len(rows))
    features = cache.get(rows) if keep else None
    if features is None:
        if stored is None:
            features = compute_features(run.setup, run.frozen, batch)
        else:
            features = complete_features(run.setup, run.frozen, *stored.rows(rows))
        if keep:
            cache.put(rows, features)
    return features


def _step_metrics(run: Run, budget: Budget, step: int, outcome, batch) -> dict[str, Any]:
    meter = AcceptanceMeter(run.config.training.ttt_steps)
    meter.add(outcome.counts, np.asarray(outcome.hits), batch.loss_mask, batch.document_ids)
    return {
        "step": step + 1,
        "epoch": round((step + 1) / budget.pass_steps, 3),
        "loss": float(outcome.loss),
        "loss_by_step": np.asarray(outcome.losses).round(5).tolist(),
        "grad_norm": float(outcome.grad_norm),
        **meter.summary(),
    }


def evaluate(run: Run, state: TrainState) -> dict[str, Any]:
    """Loss and acceptance on all held-out rows, with `evaluate_steps` draft steps."""
    training = run.config.training
    setup = run.setup._replace(steps=training.evaluate_steps)
    meter, losses = AcceptanceMeter(training.evaluate_steps), []
    for rows, batch in batches_in_order(run.heldout, training.batch_rows):
        features = _features(run, run.heldout_stored, run.heldout_cache, rows, batch)
        outcome = evaluate_batch(setup, run.frozen, state.trainable, batch, features)
        meter.add(outcome.counts, np.asarray(outcome.hits), batch.loss_mask, batch.document_ids)
        losses.append((float(outcome.losses[0]), int(np.asarray(outcome.counts.total)[0])))
    weight = max(sum(count for _, count in losses), 1)
    return {"loss_first_step": sum(loss * count for loss, count in losses) / weight, **meter.summary()}


def _finish(run: Run, state: TrainState, budget: Budget, folder: Path, heldout: dict[str, Any], say) -> dict[str, Any]:
    """Exports the checkpoint with the best held-out tau and writes result.json, in that order."""
    best, step = run.checkpoints.best_step(), int(state.step)
    total = step
    if best is not None and best != step:
        candidate, extra, _ = run.checkpoints.restore(state, best)
        if extra["heldout"]["simulated_tau"] > heldout["simulated_tau"]:
            state, heldout, step = candidate, extra["heldout"], best
    params = {**jax.tree.map(jnp.asarray, state.trainable), **run.frozen.draft}
    dtype = jnp.dtype(run.config.target.dtype)
    trained = {"step": step, "ttt_steps": run.config.training.ttt_steps, **heldout}
    if run.config.data.chat_template:
        trained["chat_template"] = run.config.data.chat_template  # serving must render chats with the same
    facts = {**run.draft.facts, "training": trained}
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    draft = Draft(run.draft.config, run.draft.graph, params, run.draft.d2t, facts)
    save_draft(draft, folder / "export", run.config.training.ttt_steps)
    say(f"draft written to {folder / 'export'} (step {step}, held-out simulated tau {heldout['simulated_tau']:.3f})")
    rows, batch_rows, seed = len(run.train.input_ids), run.config.training.batch_rows, run.config.training.seed
    used = [row for first in range(budget.pass_steps) for row in rows_of_step(first, rows, batch_rows, seed)]
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
    run_folder.write_json(folder / "result.json", result)
    return result

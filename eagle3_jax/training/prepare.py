"""Preparing a run: target, documents, first draft, the static facts of the step, and then the run folder.

Nothing is written before all inputs are sound, so that a mistake does not use up the run's name.
"""

import contextlib
import datetime
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from eagle3_jax.config import Config, DraftShape, StoredConfig
from eagle3_jax.data.packing import Packed
from eagle3_jax.data.template import ChatOptions
from eagle3_jax.data.vocabulary import coverage, draft_vocabulary
from eagle3_jax.draft.draft import Draft, load_draft
from eagle3_jax.errors import UserError
from eagle3_jax.models.target import Target, load_target
from eagle3_jax.sharding import Placement, is_main, make_mesh, sync
from eagle3_jax.taps import require
from eagle3_jax.training import run_folder
from eagle3_jax.training.checkpoints import Checkpoints, wiring_facts
from eagle3_jax.training.dataset import Documents, data_warnings, pack_documents, read_documents
from eagle3_jax.training.features import FeatureCache
from eagle3_jax.training.initialise import draft_config, initial_draft
from eagle3_jax.training.loss import LossOptions
from eagle3_jax.training.measured import evaluation_prompts
from eagle3_jax.training.optimiser import make_optimiser
from eagle3_jax.training.step import Frozen, Setup
from eagle3_jax.training.stored import StoredFeatures
from eagle3_jax.training.trackers import require_trackers

# On a CPU, products with more rows at a time are up to half as fast (docs/performance.md), and memory is short.
CPU_TOKENS, CPU_CHUNK = 1024, 128


@dataclass
class Run:
    """Everything a run needs to its end. checkpoints is None until the run folder is begun. prompts: token ids of what
    is answered after training. held: what keeps other processes out of the run folder, until it is closed."""

    config: Config
    target: Target
    draft: Draft
    train: Packed
    heldout: Packed
    documents: Documents
    heldout_documents: Documents
    setup: Setup
    frozen: Frozen
    prompts: list[list[int]]
    checkpoints: Checkpoints | None = None
    stored: StoredFeatures | None = None
    heldout_stored: StoredFeatures | None = None
    cache: FeatureCache = field(default_factory=FeatureCache)
    heldout_cache: FeatureCache = field(default_factory=FeatureCache)
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def prepare(config: Config, folder: Path, target: Target | None, init_from: str | None, say) -> Run:
    """Loads everything; then, nothing being wrong, begins the run folder and opens its checkpoints."""
    date = run_folder.date_of(folder)
    run = load(config, target, init_from, say, date)
    facts = wiring_facts(run.draft, run.target.fingerprint, run.train, run.heldout)
    require_trackers(config)
    run_folder.require_room(folder, checkpoint_bytes(run), config.training.keep_checkpoints)
    sync("inputs are sound")
    with contextlib.ExitStack() as held:
        if is_main():
            held.enter_context(run_folder.begin(folder, config, init_from, date))
        sync("the folder is there")
        run.checkpoints = Checkpoints(folder / "checkpoints", facts, config.training.keep_checkpoints)
        if run.checkpoints.latest is None and is_main():
            covered = coverage(run.heldout_documents.items, run.draft.d2t)
            run_folder.write_provenance(
                folder, config, run.target, run.draft, run.train, run.documents, covered, init_from, date
            )
        run.held = held.pop_all()
    return run


def load(config: Config, target: Target | None, init_from: str | None, say, date: datetime.date | None = None) -> Run:
    """Loads the target, reads and packs the data, makes the first draft. Writes nothing.

    date: what day it is for chat templates that write the date; None = today.
    """
    placement = Placement(make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor))
    placement.check_rows(config.training.batch_rows // config.training.accumulate, "rows of a step (of one part)")
    if target is None:
        # Not all of it on one of several devices. Several processes each look at weights, so each has them on its host.
        alone = jax.process_count() == 1
        with jax.default_device(None if alone else jax.local_devices(backend="cpu")[0]):
            mesh = placement.mesh if alone else None
            target = load_target(config.target.path, config.target.dtype, mesh=mesh, quantize=config.target.quantize)
    (documents, packed), (heldout_documents, heldout) = (
        _read(config, files, target, date) for files in (config.data.train, config.data.heldout)
    )
    if documents.samples is heldout_documents.samples is None and config.data.stored != StoredConfig():
        raise UserError("data.stored says what stored features are, and these data are none / leave it out")
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
    for warning in data_warnings(documents, packed, heldout_documents, target.config.max_positions):
        say(f"warning: {warning}")
    if (rows := config.training.batch_rows) > report.rows:
        say(f"warning: training.batch_rows is {rows}, there are {report.rows} rows: the rest of each step is padding")
    if draft.facts["verifier"]["name_or_path"] is None:
        say("warning: the export will name no verifier, so servers must be told it / set training.target_hub_id")
    kept = {key: draft.params[key] for key in frozen_parts(config) if key in draft.params}
    frozen = Frozen(
        placement.weights(target.params), placement.weights(kept), placement.weights(jnp.asarray(draft.d2t))
    )
    sides = (packed, heldout, documents, heldout_documents)
    setup = make_setup(config, target, draft)._replace(placement=placement)
    prompts = evaluation_prompts(config.evaluation, target, draft, heldout, config.data.chat_template)
    return Run(config, target, draft, *sides, setup, frozen, prompts, stored=stored, heldout_stored=heldout_stored)


def _read(
    config: Config, files: str | list[str], target: Target, date: datetime.date | None
) -> tuple[Documents, Packed]:
    """Documents of the training or the held-out files, and their rows."""
    data = config.data
    options = ChatOptions(data.last_turn_only, data.chat_template, date)
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


def make_setup(config: Config, target: Target, draft: Draft) -> Setup:
    """The static facts of the step."""
    training = config.training
    skip = config.loss.out_of_vocabulary == "skip"
    loss = LossOptions(config.loss.kind, training.step_decay, skip, config.loss.lk_decay, training.feature_loss)
    return Setup(
        target.graph,
        draft.graph,
        draft.taps,
        make_optimiser(config.optimiser),
        training.ttt_steps,
        loss,
        training.compute_dtype,
        training.feature_noise,
        training.seed,
        _parts(config),
        config.optimiser.ema,
        training.remat,
        min(training.teacher_chunk, CPU_CHUNK) if _on_one_cpu() else training.teacher_chunk,
    )


def _parts(config: Config) -> int:
    """In how many parts the rows of a step are computed: `accumulate`, or more on a CPU, see CPU_TOKENS."""
    rows, parts = config.training.batch_rows, config.training.accumulate
    if not _on_one_cpu():
        return parts
    small = (n for n in range(parts, rows + 1) if rows % n == 0 and rows // n * config.data.length <= CPU_TOKENS)
    return next(small, rows)


def _on_one_cpu() -> bool:
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def frozen_parts(config: Config) -> tuple[str, ...]:
    """Top-level parameters of the draft that stay as they began."""
    trained = {"embed_tokens": config.training.train_embedding, "lm_head": config.training.train_head}
    return ("target_norm", *(name for name, is_trained in trained.items() if not is_trained))


def trained_parts(run: Run) -> dict:
    """The parameters of the first draft that are trained."""
    return {key: value for key, value in run.draft.params.items() if key not in run.frozen.draft}


def checkpoint_bytes(run: Run) -> int:
    """Size of a checkpoint, all in float32: what is trained, its two moments, and its average if there is one."""
    copies = 3 + (run.setup.ema is not None)
    return copies * 4 * sum(leaf.size for leaf in jax.tree.leaves(trained_parts(run)))


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
    size, whole = config.draft.vocab_size, target.config.vocab_size
    if size > whole and size != DraftShape().vocab_size:
        raise UserError(
            f"draft.vocab_size is {size}, the target's vocabulary {whole} / lower it, or leave it out for all"
        )
    size = min(size, whole)
    d2t = draft_vocabulary(documents, size, target.config.vocab_size, always=target.eos_token_ids)
    return initial_draft(config.draft, target, d2t, config.training.seed, facts)

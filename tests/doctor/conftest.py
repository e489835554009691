"""A small world with drafts that are right: a random target, its own greedy answers, drafts over-fitted on them."""

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eagle3_jax as e3
from eagle3_jax.config import DraftShape
from eagle3_jax.data.vocabulary import draft_vocabulary
from eagle3_jax.doctor.search import diagnose
from eagle3_jax.draft.draft import Draft
from eagle3_jax.draft.ttt import ttt_forward
from eagle3_jax.training.initialise import initial_draft
from eagle3_jax.training.loss import Teacher, ttt_loss
from tests.tiny import target_config, target_tensors, write_target

LAYERS = 7
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
TAPS = [0, 2, 4]
DOCUMENTS, PROMPT, LENGTH = 24, 4, 26
DRAFT_VOCABULARY = 42  # of 48
STEPS = 150


@dataclass(frozen=True, eq=False)
class World:
    """A target on disk and loaded, and its own greedy answers: as documents (ids, mask), as a file."""

    target: e3.Target
    folder: Path
    documents: list
    data: Path

    @functools.cache  # noqa: B019 (one world a session)
    def untrained(self, **flags: bool) -> Draft:
        shape = DraftShape(taps=TAPS, vocab_size=DRAFT_VOCABULARY, **flags)
        d2t = draft_vocabulary(self.documents, DRAFT_VOCABULARY, SHAPE["vocab_size"])
        return initial_draft(shape, self.target, d2t, 0, {"target": {"fingerprint": self.target.fingerprint}})

    def train(self, learn: str = "final norm", last: str | None = None, **flags: bool) -> Draft:
        """A draft over-fitted on all documents. learn: norm of the teacher; last: tap N so normed for TAPS[2]."""
        ids = jnp.asarray([ids for ids, _ in self.documents])
        mask = jnp.asarray([mask for _, mask in self.documents])
        out = self.target.forward(ids, taps=TAPS)
        weight, head = self.target.params["model"]["norm"]["weight"], self.target.params["lm_head"]["weight"]
        x, draft = out.last_hidden, self.untrained(**flags)
        states = {"no final norm": x, "final norm": weight * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)}
        features = out.taps if last is None else e3.Taps((*out.taps.arrays[:2], states[last]), draft.taps)
        teacher = jnp.einsum("bth,vh->btv", states[learn], head[draft.d2t])
        taps = e3.TapSet(TAPS if last is None else [*TAPS[:2], LAYERS])
        params = _fit(draft.graph, draft.params, features, teacher, ids, mask)
        config = dataclasses.replace(draft.config, taps=taps)
        return dataclasses.replace(draft.with_params(params), config=config)


@functools.partial(jax.jit, static_argnums=0)
def _fit(graph, params, features: e3.Taps, teacher, ids, mask):
    """Parameters after STEPS full-batch steps of Adam on the loss of training."""
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
    documents, positions = jnp.zeros_like(ids), jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)

    def loss(params):
        logits = ttt_forward(graph.merge(params), features, ids, positions, documents, 2)
        return ttt_loss(logits, Teacher(teacher), mask, documents)[0]

    def step(state, _):
        params, moments = state
        updates, moments = optimiser.update(jax.grad(loss)(params), moments)
        return (optax.apply_updates(params, updates), moments), None

    return jax.lax.scan(step, (params, optimiser.init(params)), length=STEPS)[0][0]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("doctor")
    tensors = target_tensors(target_config(**SHAPE))
    for name, tensor in tensors.items():  # larger weights: answers that vary, and choices that are clear
        tensor *= 1 if "norm" in name else 8 if "lm_head" in name else 2 if "embed" in name else 1.5
    folder = write_target(root / "target", tensors=tensors, **SHAPE)
    target = e3.load_target(folder, "float32")
    ids = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (DOCUMENTS, LENGTH))
    for t in range(PROMPT, LENGTH):
        ids[:, t] = np.argmax(target.forward(ids, taps=TAPS).logits[:, t - 1], axis=-1)
    mask = np.arange(LENGTH) >= PROMPT
    data = root / "data.jsonl"
    rows = [{"input_ids": row.tolist(), "loss_mask": mask.astype(int).tolist()} for row in ids]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return World(target, folder, [(row.astype(np.int32), mask) for row in ids], data)


KINDS = {
    "good": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "wrong teacher": {"learn": "no final norm"},
    "last tap normed": {"last": "final norm"},
}


@pytest.fixture(scope="session")
def drafts(world: World):
    """`drafts[kind]` is an over-fitted draft, made when it is first asked for: a plain and an EAGLE-3.1 one, both good,
    and two that were trained wrongly."""

    class Drafts(dict):
        def __missing__(self, kind: str) -> Draft:
            self[kind] = world.train(**KINDS[kind])
            return self[kind]

    return Drafts()


@pytest.fixture(scope="session")
def doctor(world: World):
    """Diagnoses an opened draft on all documents; to depth 2, which compiles in half the time of depth 4."""
    return lambda opened, depth=2: diagnose(world.target, opened, world.documents, 4096, depth=depth)

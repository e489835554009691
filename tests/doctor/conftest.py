"""A small world with drafts that are right: a random target, its own greedy answers, drafts over-fitted on them."""

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
from eagle3_jax.data.packing import pack
from eagle3_jax.data.vocabulary import draft_vocabulary
from eagle3_jax.doctor.search import diagnose
from eagle3_jax.draft.draft import Draft
from eagle3_jax.draft.ttt import document_positions, ttt_forward
from eagle3_jax.training.initialise import initial_draft
from eagle3_jax.training.loss import ttt_loss
from tests.tiny import target_config, target_tensors, write_target

LAYERS = 8
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
TAPS = [0, 2, 5]
LENGTH, PROMPT, ANSWER = 50, 4, 21
DRAFT_VOCABULARY = 42  # of 48


@dataclass(frozen=True)
class World:
    target: e3.Target
    folder: Path
    documents: list
    data: Path
    steps: int = 200

    def train(self, learn: str = "final norm", normed: bool = False, seed: int = 0, **shape) -> Draft:
        """A draft over-fitted on all documents. learn: the teacher; normed: the tap N it reads is after the norm."""
        shape = DraftShape(**{"taps": TAPS, "vocab_size": DRAFT_VOCABULARY, **shape})
        d2t = draft_vocabulary(self.documents, DRAFT_VOCABULARY, SHAPE["vocab_size"])
        draft = initial_draft(shape, self.target, d2t, seed, {"target": {"fingerprint": self.target.fingerprint}})
        packed = pack(self.documents, LENGTH)
        out = self.target.forward(packed.input_ids, taps=draft.taps.points)
        norm, head = self.target.params["model"]["norm"]["weight"], self.target.params["lm_head"]["weight"]

        def final_norm(x):
            return norm * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)

        arrays = out.taps.arrays
        if normed:
            arrays = (*arrays[:-1], final_norm(arrays[-1]))
        hidden = {"final norm": final_norm, "no final norm": lambda x: x}[learn](out.last_hidden)
        teacher = jnp.einsum("bth,vh->btv", hidden, head[d2t])
        return draft.with_params(_fit(draft, e3.Taps(arrays, draft.taps), packed, teacher, self.steps))


def _fit(draft: Draft, features: e3.Taps, packed, teacher, steps: int):
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    documents, mask = jnp.asarray(packed.document_ids), jnp.asarray(packed.loss_mask)
    ids, positions = jnp.asarray(packed.input_ids), document_positions(jnp.asarray(packed.document_ids))

    def loss(params, teacher):
        logits, _ = ttt_forward(draft.graph.merge(params), features, ids, positions, documents, 3)
        return ttt_loss(logits, teacher, mask, documents)[0]

    @jax.jit
    def fit(params, teacher):
        def step(state, _):
            params, moments = state
            updates, moments = optimiser.update(jax.grad(loss)(params, teacher), moments)
            return (optax.apply_updates(params, updates), moments), None

        return jax.lax.scan(step, (params, optimiser.init(params)), length=steps)[0][0]

    return fit(draft.params, teacher)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("doctor")
    tensors = target_tensors(target_config(**SHAPE))
    for name, tensor in tensors.items():  # larger weights: answers that vary, and choices that are clear
        tensor *= 1 if "norm" in name else 8 if "lm_head" in name else 2 if "embed" in name else 1.5
    folder = write_target(root / "target", tensors=tensors, **SHAPE)
    target = e3.load_target(folder, "float32")
    prompts = np.random.default_rng(0).integers(3, 48, (24, PROMPT)).tolist()
    answers = [r.tokens for r in e3.generate(target, None, prompts, ANSWER, stop_token_ids=())]
    rows = [(p + a, [0] * PROMPT + [1] * ANSWER) for p, a in zip(prompts, answers, strict=True)]
    data = root / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": i, "loss_mask": m}) + "\n" for i, m in rows))
    documents = [(np.array(i, np.int32), np.array(m, bool)) for i, m in rows]
    return World(target, folder, documents, data)


@pytest.fixture(scope="session")
def drafts(world: World) -> dict[str, Draft]:
    """Over-fitted drafts. good: all flags off; modern: all flags that are now the fashion; two trained wrongly."""
    modern = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
    return {
        "good": world.train(),
        "modern": world.train(**modern),
        "wrong teacher": world.train(learn="no final norm"),
        "last tap normed": world.train(normed=True, taps=[0, 2, LAYERS]),
    }


@pytest.fixture(scope="session")
def doctor(world: World):
    """Diagnoses an opened draft on all documents."""
    return lambda opened: diagnose(world.target, opened, world.documents, 4096, "float32")

"""Every family against Hugging Face transformers: logits, every tap, cached decoding in a tree, a step of training.

The tiny models come from tools/make_goldens.py, the larger ones (other options) from the shared golden tensors. Most
runs are op by op: compiling a forward pass of each family would take most of the time of these tests.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax.models.attention import cached_where, empty_cache
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.speculate.drafting import window_mask
from eagle3_jax.speculate.round import node_places
from eagle3_jax.training.step import Batch, Frozen, Setup, TrainState, compute_features, train_step
from tests.tiny import random_draft, relative

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "targets"
TINY = sorted(folder.name for folder in GOLDEN.glob("*_tiny"))
LAYER = {"hidden_size": 32, "intermediate_size": 40}  # of the tiny models' drafts
SHARED = ("mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3_text", "gpt_oss")


@pytest.fixture(scope="module")
def load():
    """`load(name)` is a tiny golden target in float32, loaded once, with what is expected of it."""
    loaded = {}

    def get(name: str) -> tuple[e3.Target, dict[str, np.ndarray]]:
        if name not in loaded:
            folder = GOLDEN / name
            loaded[name] = e3.load_target(folder, "float32"), load_file(folder / "expected.safetensors")
        return loaded[name]

    return get


def assert_as_hugging_face(target: e3.Target, expected: dict[str, np.ndarray]) -> None:
    last = target.num_layers
    out = target.forward(expected["input_ids"], taps=range(last + 1))
    for k in range(last):
        assert relative(out.taps.arrays[k], expected[f"hidden.{k}"]) < 1e-5, f"tap {k}"
    # Hugging Face's hidden_states[N] is after the final norm, our tap N is before it
    assert relative(out.taps.arrays[last], expected["pre_norm_last"]) < 1e-5
    assert relative(out.logits, expected["logits"]) < 1e-5


@pytest.mark.parametrize("case", TINY)
def test_tiny_models_compute_what_hugging_face_does(load, case: str) -> None:
    assert_as_hugging_face(*load(case))


@pytest.mark.parametrize("case", SHARED)
def test_shared_models_compute_what_hugging_face_does(golden, case: str) -> None:
    folder = golden(f"targets/{case}")
    assert_as_hugging_face(e3.load_target(folder, "float32"), load_file(folder / "expected.safetensors"))


def test_every_family_has_a_tiny_model() -> None:
    configs = [json.loads((GOLDEN / case / "config.json").read_text()) for case in TINY]
    assert {config["architectures"][0] for config in configs} == {family.architecture for family in FAMILIES}


# A tree of six nodes behind eight committed tokens: the root, its children 1 and 2, and 3 below 2, 4 and 5 below 1.
COMMITTED, DEPTH, ABOVE = 8, [0, 1, 1, 2, 2, 2], [[], [0], [0], [0, 2], [0, 1], [0, 1]]


@pytest.mark.parametrize("case", TINY)
def test_nodes_of_a_tree_see_what_single_tokens_would(load, case: str) -> None:
    """Over a cache, each node's logits are those of its path alone; windows count positions and not cache entries."""
    target, expected = load(case)
    config = target.config
    ids = expected["input_ids"].astype(np.int32)  # the committed tokens, then the nodes: every node is another token
    batch, width = ids.shape
    entries, length = 24, jnp.full(batch, COMMITTED)
    sees = np.eye(len(DEPTH), dtype=bool)[None].repeat(batch, 0)
    for node, above in enumerate(ABOVE):
        sees[:, node, above] = True
    paths = [[0, 2, 3], [0, 1, 5]]  # the one followed in each row
    alone = ids.copy()
    for row, path in enumerate(paths):
        alone[row, COMMITTED : COMMITTED + 3] = ids[row, COMMITTED + np.asarray(path)]

    @jax.jit
    def over_a_cache(params, ids):
        model = target.graph.merge(params)
        shape = (config.num_layers, batch, config.num_kv_heads, entries, config.head_dim)
        cache = empty_cache(*shape, jnp.float32, config.value_dim)
        at, places = node_places(length, jnp.asarray([DEPTH] * batch), entries)
        before = jnp.broadcast_to(jnp.arange(COMMITTED), (batch, COMMITTED))
        mask = jnp.concatenate(
            [jnp.arange(entries) <= before[..., None], window_mask(length, jnp.asarray(sees), entries)], axis=1
        )
        positions = jnp.concatenate([before, at], axis=1)
        attend = cached_where(jnp.zeros(batch, jnp.int32), mask, positions, places=places)
        last, _, _ = model(ids, positions, attend, cache, lengths=jnp.full(ids.shape, width))
        return model.logits(last)

    got = over_a_cache(target.params, ids)
    wanted = target.forward(alone, taps=range(config.num_layers + 1)).logits  # the program of the test above
    for row, path in enumerate(paths):
        for step, node in enumerate(path):
            assert relative(got[row, COMMITTED + node], wanted[row, COMMITTED + step]) < 1e-5, (row, node)


@pytest.mark.parametrize("name", ["gemma2", "deepseek"])
def test_speculative_text_is_hugging_faces_greedy_text(load, name: str) -> None:
    target, expected = load(f"{name}_tiny")
    draft = random_draft(target, taps=(0, 1, 3), d2t=np.arange(0, 64, 2), layer=LAYER)
    prompts, greedy = expected["input_ids"].tolist(), expected["greedy_ids"].tolist()
    answers = e3.generate(target, draft, prompts, len(greedy[0]), strategy="tree:2x2x4", stop_token_ids=())
    assert [answer.tokens for answer in answers] == greedy


@pytest.mark.parametrize("name", ["gemma2", "deepseek"])
def test_a_step_of_training_lowers_the_loss(load, name: str) -> None:
    target, expected = load(f"{name}_tiny")
    draft = random_draft(target, taps=(0, 1, 3), d2t=np.arange(0, 64, 2), layer=LAYER)
    setup = Setup(target.graph, draft.graph, draft.taps, optax.sgd(0.1), 2, compute_dtype="float32")
    trainable = {key: value for key, value in draft.params.items() if key != "embed_tokens"}
    frozen = Frozen(target.params, {"embed_tokens": draft.params["embed_tokens"]}, jnp.asarray(draft.d2t))
    ids = jnp.asarray(expected["input_ids"], jnp.int32)
    batch = Batch(ids, jnp.ones(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32))
    state, losses = TrainState(trainable, setup.optimiser.init(trainable), jnp.zeros((), jnp.int32)), []
    with jax.disable_jit():
        features = compute_features(setup, frozen, batch)
        for _ in range(2):
            state, outcome = train_step(setup, frozen, state, batch, features, jnp.ones(()))
            losses.append(float(outcome.loss))
    assert losses[1] < losses[0]

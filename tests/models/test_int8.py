"""int8 weights: codes and scales, what is quantised and what is not, the same numbers as the weights multiplied out."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import eagle3_jax as e3
from eagle3_jax.draft.draft import binding_warning
from eagle3_jax.models.fingerprint import same_weights
from eagle3_jax.models.int8 import dense, quantise
from eagle3_jax.models.weights import flatten
from eagle3_jax.sharding import AXES, shardings
from tests.tiny import ids_of, random_draft, relative, write_target

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "targets"


def test_codes_and_scales() -> None:
    weight = np.random.default_rng(0).standard_normal((3, 5, 40)).astype(np.float32)
    weight[1, 2] = 0
    weight[2, 4] *= 1e-6  # each row has a scale of its own
    codes, scale = quantise(weight)
    assert (codes.dtype, scale.dtype) == (jnp.int8, jnp.float32) and (codes.shape, scale.shape) == ((3, 5, 40), (3, 5))
    assert np.abs(codes[scale > 0]).max(axis=-1).tolist() == [127] * 14  # symmetric, all of the range
    error = np.abs(np.asarray(codes) * np.asarray(scale)[..., None] - weight)
    assert (error <= np.asarray(scale)[..., None] * 0.5001).all()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[e3.Target, e3.Target]:
    """A target plain and in int8, both in float32."""
    folder = write_target(tmp_path_factory.mktemp("int8") / "target", seed=4, num_hidden_layers=2)
    return e3.load_target(folder, "float32"), e3.load_target(folder, "float32", quantize="int8")


@pytest.mark.parametrize("case", ["qwen3_moe_tiny", "deepseek_tiny", "gpt_oss_tiny", "phi3_tiny", "gemma3_tiny"])
def test_a_quantised_target_computes_what_its_weights_multiplied_out_do(case: str) -> None:
    plain, target = (e3.load_target(GOLDEN / case, "float32", quantize=kind) for kind in (None, "int8"))
    multiplied = dataclasses.replace(plain, params=dense(target.params))
    with jax.disable_jit():
        ids = ids_of(0, 2, 14, vocab_size=64)  # of the shape in test_families.py, so that little has to be compiled
        got, expected, exact = (each.forward(ids, (0, 2, 3)) for each in (target, multiplied, plain))
    assert relative(got.logits, expected.logits) < 1e-5
    for ours, theirs in zip(got.taps.arrays, expected.taps.arrays, strict=True):
        assert relative(ours, theirs) < 1e-5
    assert 1e-4 < relative(got.logits, exact.logits) < 0.1


def test_kernels_of_blocks_are_quantised_and_nothing_else() -> None:
    target = e3.load_target(GOLDEN / "deepseek_tiny", quantize="int8")
    for name, array in flatten(target.params).items():
        kernel = ".layers." in name and "_proj" in name and name.endswith(".weight")
        kind = "int8" if kernel else "float32" if name.endswith((".scale", "score_correction_bias")) else "bfloat16"
        assert str(array.dtype) == kind, name
    assert target.dtype == jnp.bfloat16


def test_scales_lie_where_their_outputs_lie() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)
    target = e3.load_target(GOLDEN / "qwen3_moe_tiny", quantize="int8")
    specs = {name: sharding.spec for name, sharding in flatten(shardings(mesh, target.params)).items()}
    scales = [name for name in specs if name.endswith(".scale")]
    assert len(scales) > 10
    for name in scales:
        assert specs[name] == PartitionSpec(*specs[f"{name.removesuffix('scale')}weight"][:-1]), name
    assert specs["model.layers.0.self_attn.q_proj.scale"] == PartitionSpec(("tensor",))


def test_blocks_take_half_the_memory_of_bfloat16(pair) -> None:
    plain, quantised = (sum(a.nbytes for a in jax.tree.leaves(t.params["model"]["layers"])) for t in pair)
    assert quantised < 0.3 * plain  # of float32; scales and norms count in matrices as small as these


def test_speculative_text_is_the_plain_text_of_the_quantised_target(pair) -> None:
    plain, target = pair
    draft, prompt = random_draft(target, taps=(0, 1, 2)), ids_of(1, 6).tolist()
    expected = e3.generate(target, None, prompt, 16, stop_token_ids=())
    assert e3.generate(target, draft, prompt, 16, strategy="chain:2", stop_token_ids=()).tokens == expected.tokens


def test_copies_are_told_apart_and_a_draft_of_the_other_is_told(pair) -> None:
    plain, target = pair
    assert same_weights(plain.fingerprint, target.fingerprint)
    assert plain.fingerprint["hash"] != target.fingerprint["hash"]
    assert (plain.fingerprint.get("quantize"), target.fingerprint["quantize"]) == (None, "int8")
    for own, other, words in (
        (target, plain, "weights int8, here they are not quantised"),
        (plain, target, "weights not quantised, here they are int8"),
    ):
        draft = random_draft(own, taps=(0, 1, 2))
        assert binding_warning(draft, own) is None
        assert draft.bind(other) and words in binding_warning(draft, other)


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(e3.UserError, match="quantize 'int4' / give one of"):
        e3.load_target(tmp_path, quantize="int4")

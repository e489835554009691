"""First weights: their sizes, and a draft that begins as the target's last block."""

import jax
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.config import DraftShape
from eagle3_jax.errors import UserError
from eagle3_jax.models.weights import flatten
from eagle3_jax.taps import WiringError
from eagle3_jax.training import prepare
from eagle3_jax.training.initialise import draft_config, initial_draft
from tests.tiny import ids_of, relative, write_target

D2T = np.arange(0, 48, 2)


def made(world, **shape) -> e3.Draft:
    shape = DraftShape(**({"taps": [1, 2, 3], "vocab_size": len(D2T)} | shape))
    return initial_draft(shape, world.target, D2T, 0, {})


def test_random_weights(world) -> None:
    draft = made(world, num_layers=2, fc_norm=True)
    target = world.target.params
    for name, value in flatten(draft.params).items():
        if name in ("norm.weight", "lm_head.weight", "embed_tokens.weight"):
            continue
        assert value.dtype == np.float32
        if "norm" in name:
            np.testing.assert_array_equal(value, 1.0)
        else:
            if name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight")):  # what writes to the state
                weight = np.abs(target["model"]["norm"]["weight"])
                value = value * np.maximum(weight / np.median(weight), 0.01)[:, None]
            assert np.std(value) == pytest.approx(1 / np.sqrt(value.shape[1]), rel=0.15)
    np.testing.assert_array_equal(draft.params["norm"]["weight"], target["model"]["norm"]["weight"])
    np.testing.assert_array_equal(draft.params["lm_head"]["weight"], target["lm_head"]["weight"][D2T])
    embedding = target["model"]["embed_tokens"]["weight"]
    np.testing.assert_array_equal(draft.params["embed_tokens"]["weight"], embedding)


def test_a_seed_repeats_and_another_differs(world) -> None:
    def fc(seed: int):
        draft = initial_draft(DraftShape(taps=[1, 2, 3], vocab_size=24), world.target, D2T, seed, {})
        return np.asarray(draft.params["fc"]["weight"])

    np.testing.assert_array_equal(fc(3), fc(3))
    assert relative(fc(3), fc(4)) > 0.5


def test_the_shape_follows_the_target_and_the_config(world) -> None:
    config = draft_config(DraftShape(taps=[4, 0], num_layers=2, intermediate_size=80, vocab_size=32000), world.target)
    assert list(config.taps) == [4, 0] and config.draft_vocab_size == 48
    assert (config.decoder.num_layers, config.decoder.intermediate_size) == (2, 80)
    assert config.decoder.rope == world.target.config.rope
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        on = draft_config(DraftShape(taps=[1, 2], **{flag: True}), world.target)
        assert getattr(on, flag) and not getattr(config, flag)


def test_taps_that_the_target_lacks(world) -> None:
    with pytest.raises(WiringError, match="tap 5 does not exist: the target has 4 blocks"):
        draft_config(DraftShape(taps=[1, 5]), world.target)
    with pytest.raises(UserError, match="name distinct taps"):
        draft_config(DraftShape(), world.target)  # (2, 2, 1) of 4 blocks


def test_last_block_computes_what_the_last_block_does(world) -> None:
    # Fed with that block's own input as the last tap, and with what begins small and random taken away, the first
    # draft step is the target's last block, norm and head: it says at slot t what the target says at token t.
    draft = made(world, initialise="last_block", taps=[1, 2, 3])
    size = world.target.config.hidden_size
    params = jax.tree.map(np.array, draft.params)
    params["fc"]["weight"][:, : 2 * size] = 0
    for name in "qkv":
        projection = params["layers"][0]["self_attn"][f"{name}_proj"]["weight"]
        small, block = projection[:, :size], projection[:, size:]
        assert 0 < np.std(small) < 0.2 / np.sqrt(2 * size) and np.std(block) > np.std(small)
        small[:] = 0
    ids = ids_of(1, 2, 12, vocab_size=48)
    out = world.target.forward(ids, taps=draft.taps)
    logits = draft.with_params(jax.tree.map(jax.numpy.asarray, params)).ttt_forward(out.taps, ids, 1)[0]
    assert relative(logits, out.logits[:, :-1][..., D2T]) < 1e-4


def test_last_block_in_every_layer(world) -> None:
    draft, block = made(world, initialise="last_block", num_layers=2), world.target.params["model"]["layers"][3]
    second = draft.params["layers"][1]
    assert flatten(second).keys() == flatten(block).keys()
    for name, value in flatten(block).items():
        np.testing.assert_array_equal(flatten(second)[name], value)


def test_last_block_needs_the_blocks_own_shape(world, tmp_path) -> None:
    with pytest.raises(UserError, match="last_block"):
        made(world, initialise="last_block", intermediate_size=40)
    biased = e3.load_target(write_target(tmp_path / "biased", mlp_bias=True), "float32")
    with pytest.raises(UserError, match="last_block"):
        initial_draft(DraftShape(taps=[1, 2], vocab_size=24, initialise="last_block"), biased, D2T, 0, {})


@pytest.mark.parametrize("name", ["gemma3", "phi3", "deepseek"])
def test_drafts_of_other_families_have_plain_blocks(golden, name: str) -> None:
    target = e3.load_target(golden(f"targets/{name}_tiny"), "float32")
    shape = DraftShape(taps=[1, 2], vocab_size=24)
    draft = initial_draft(shape, target, D2T, 0, {})
    decoder = draft.config.decoder
    assert decoder.rope.head_dim == decoder.head_dim == (8 if name == "deepseek" else target.config.head_dim)
    assert decoder.rope.kind == ("default" if name == "phi3" else target.config.rope.kind)
    offset = 1 if name == "gemma3" else 0  # Gemma stores what its norms multiply by minus one
    stored = np.asarray(target.params["model"]["norm"]["weight"])
    np.testing.assert_array_equal(draft.params["norm"]["weight"], stored + np.float32(offset))
    if name != "phi3":  # whose blocks are Llama's once the fused projections are split
        with pytest.raises(UserError, match="last_block needs a target"):
            initial_draft(DraftShape(taps=[1, 2], vocab_size=24, initialise="last_block"), target, D2T, 0, {})


def test_a_run_on_an_int8_target(world, tmp_path) -> None:
    """The draft grows from the block as it is computed, learns from what that target computes, and says so."""
    config = world.config(tmp_path, target={"quantize": "int8"}, draft={"initialise": "last_block"})
    run = prepare.load(config, None, None, lambda line: None)
    ours, plain = run.draft.params["layers"][0]["mlp"]["down_proj"], made(world, initialise="last_block").params
    assert 0 < relative(ours["weight"], plain["layers"][0]["mlp"]["down_proj"]["weight"]) < 0.02
    assert str(run.frozen.target["model"]["layers"][3]["mlp"]["down_proj"]["weight"].dtype) == "int8"
    assert run.draft.facts["target"]["fingerprint"]["quantize"] == "int8"

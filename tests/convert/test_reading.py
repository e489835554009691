"""Drafts of other systems through `e3.load_draft`: names, taps, vocabulary maps, parts that are missing, other kinds.

Numbers in brackets are entries of ../shared/spec/field-bugs.md.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax.draft.draft import stored_tensors
from eagle3_jax.models.config import decoder_config
from eagle3_jax.models.rope import rotary
from eagle3_jax.taps import UnknownTaps
from tests.convert.folders import CONFIGS, LAYOUTS, TAPS, same_tensors, write
from tests.tiny import ids_of, random_draft, relative, target_config, write_target


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_means_the_same_draft(tmp_path: Path, tiny_draft, layout: str) -> None:
    folder = write(tmp_path / "draft", tiny_draft, layout)
    draft = e3.load_draft(folder, taps=TAPS if layout == "safeailab" else None)
    assert draft.config == tiny_draft.config
    expected = stored_tensors(tiny_draft)
    if layout != "speculators":
        del expected["embed_tokens.weight"]
    same_tensors(draft, expected)
    assert draft.is_bound == (layout == "speculators")


RENAMES = {  # [9]
    "midlayer": lambda name: name.replace("layers.0.", "midlayer."),
    "layers.0": lambda name: name.replace("midlayer.", "layers.0."),
    "model.layers.0": lambda name: f"model.{name.replace('midlayer.', 'layers.0.')}" if "2" not in name[1] else name,
    "wrapped": lambda name: f"module._orig_mod.{name}",  # by DistributedDataParallel and torch.compile
    "model.midlayer": lambda name: f"model.{name.replace('layers.0.', 'midlayer.')}" if "2" not in name[1] else name,
}


@pytest.mark.parametrize("layout", ["safeailab", "sglang", "speculators"])
@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_the_names_of_every_system_are_known(tmp_path: Path, tiny_draft, layout: str, rename) -> None:
    folder = write(tmp_path / "draft", tiny_draft, layout, rename=rename)
    draft = e3.load_draft(folder, taps=TAPS)
    for name, array in stored_tensors(tiny_draft).items():
        if name in stored_tensors(draft):
            np.testing.assert_array_equal(stored_tensors(draft)[name], array)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", ["self_attn.q_proj", "hidden_norm", "post_attention_layernorm"])
def test_a_misspelt_or_missing_tensor_is_named(tmp_path: Path, tiny_draft, layout: str, part: str) -> None:
    wrong = write(tmp_path / "a", tiny_draft, layout, rename=lambda name: name.replace(part, f"{part}q"))
    with pytest.raises(e3.UserError, match=rf"missing: layers\.0\.{part}\.weight; not used: .*{part}q"):
        e3.load_draft(wrong, taps=TAPS)
    name = ("midlayer." if layout in ("sglang", "safeailab") else "layers.0.") + f"{part}.weight"
    lacking = write(tmp_path / "b", tiny_draft, layout, tensors={name: None})
    with pytest.raises(e3.UserError, match=rf"missing: layers\.0\.{part}\.weight"):
        e3.load_draft(lacking, taps=TAPS)


def test_two_names_for_one_tensor_are_refused(tmp_path: Path, tiny_draft) -> None:
    twice = write(tmp_path / "draft", tiny_draft, "sglang", tensors={"model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(e3.UserError, match=r"are the same tensor \(norm\.weight\)"):
        e3.load_draft(twice)


def test_legacy_names_of_the_norms_of_taps(tmp_path: Path, tiny_target) -> None:
    draft = random_draft(tiny_target, fc_norm=True)
    places = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}

    def rename(name: str) -> str:
        return next((new + name[len(old) :] for old, new in places.items() if name.startswith(old)), name)

    folder = write(tmp_path / "draft", draft, "sglang", rename=rename, use_aux_norm=True)
    assert e3.load_draft(folder).config == draft.config


# --- taps [1, 2, 3, 4, 24, 25, 26]


def nested(ids: list[int] | None, **more) -> dict:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, **more}}


@pytest.mark.parametrize("layout", ["safeailab", "sglang", "modelopt", "speculators"])
def test_a_file_without_ids_is_refused_with_the_likely_lists(tmp_path: Path, tiny_draft, tiny_target, layout) -> None:
    changes = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}
    folder = write(tmp_path / "draft", tiny_draft, layout, **changes)
    with pytest.raises(UnknownTaps, match=r"--taps: likely are \[2, N//2, N-3\] or \[3, N//2\+1, N-2\]") as caught:
        e3.load_draft(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(UnknownTaps, match=r"likely are \[2, 4, 5\] or \[3, 5, 6\]"):
        e3.load_draft(folder, target=tiny_target)
    assert "python -m convert SRC DST --to speculators --taps" in str(caught.value)  # no other command has --taps
    assert e3.load_draft(folder, taps=[6, 0, 3]).taps == e3.TapSet([6, 0, 3])
    assert e3.load_draft(folder, taps=np.array([6, 0, 3])).taps.points == (6, 0, 3)


@pytest.mark.parametrize("layout", ["sglang", "modelopt"])
def test_ids_whose_first_is_one_are_block_outputs(tmp_path: Path, tiny_draft, layout: str) -> None:
    folder = write(tmp_path / "draft", tiny_draft, layout)
    assert e3.load_draft(folder).taps == e3.TapSet([2, 4, 6])
    assert e3.load_draft(folder, taps=[2, 4, 6]).taps == e3.TapSet([2, 4, 6])
    with pytest.raises(e3.WiringError, match=r"expected \[block 2 input.* got \[block 1 input.* \(as given\) / .*json"):
        e3.load_draft(folder, taps=[1, 3, 5])


@pytest.mark.parametrize("layout", ["sglang", "modelopt"])
def test_other_nested_ids_are_ambiguous(tmp_path: Path, tiny_draft, layout: str) -> None:
    folder = write(tmp_path / "draft", tiny_draft, layout, **nested([2, 4, 6]))
    with pytest.raises(UnknownTaps, match=r"older SGLang adds one.*block 3 input.*newer.*block 2 input.*--convention"):
        e3.load_draft(folder)
    assert e3.load_draft(folder, taps=[2, 4, 6]).taps == e3.TapSet([2, 4, 6])
    assert e3.load_draft(folder, taps=[3, 5, 7]).taps == e3.TapSet([3, 5, 7])
    with pytest.raises(e3.WiringError, match="got .block 1 input"):
        e3.load_draft(folder, taps=[1, 3, 5])


def test_a_top_level_list_decides(tmp_path: Path, tiny_draft) -> None:
    agreeing = [([2, 4, 6], [1, 3, 5]), ([2, 4, 6], [2, 4, 6]), ([3, 5, 7], [2, 4, 6])]
    for i, (top, inner) in enumerate(agreeing):
        place = tmp_path / f"agree{i}"
        folder = write(place, tiny_draft, "sglang", eagle_aux_hidden_state_layer_ids=top, **nested(inner))
        assert list(e3.load_draft(folder).taps) == top
    for i, (top, inner) in enumerate([([1, 3, 5], [1, 3, 5]), ([2, 4, 6], [4, 6, 8]), ([2, 4, 6], [5, 3, 1])]):
        place = tmp_path / f"conflict{i}"
        folder = write(place, tiny_draft, "sglang", eagle_aux_hidden_state_layer_ids=top, **nested(inner))
        with pytest.raises(e3.WiringError, match="contradicts itself: its top-level ids .* eagle_config ids"):
            e3.load_draft(folder)
    folder = write(tmp_path / "speculators", tiny_draft, "speculators", **nested([2, 3, 4]))
    with pytest.raises(e3.WiringError, match="contradicts itself"):
        e3.load_draft(folder)


def test_four_taps_the_last_a_late_layer(tmp_path: Path, tiny_target) -> None:
    flags = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
    draft = random_draft(tiny_target, taps=(2, 4, 6, 7), **flags)
    raw = {**flags, "fc_norm": False, "eagle_aux_hidden_state_layer_ids": [2, 4, 6, 7]}
    assert e3.load_draft(write(tmp_path / "a", draft, "speculators", **raw)).config == draft.config
    three = random_draft(tiny_target, **flags)
    with pytest.raises(e3.UserError, match=r"names 4 taps .2, 4, 6, 7. but fc\.weight is 192 wide, which is 3 taps"):
        e3.load_draft(write(tmp_path / "b", three, "speculators", **raw))


def test_a_tap_after_the_last_block_and_beyond(tmp_path: Path, tiny_target) -> None:
    draft = random_draft(tiny_target, taps=(4, 6, 8), norm_before_fc=True)
    folder = write(tmp_path / "a", draft, "sglang", norm_before_fc=True, **nested([4, 6, 8]))
    assert e3.load_draft(folder, taps=[4, 6, 8], target=tiny_target).taps == e3.TapSet([4, 6, 8])
    with pytest.raises(UnknownTaps, match="the older SGLang adds one"):
        e3.load_draft(folder)
    # The older SGLang's reading would be the input of a ninth block: of this target there is one reading.
    assert e3.load_draft(folder, target=tiny_target).taps == e3.TapSet([4, 6, 8])
    beyond = write(tmp_path / "b", draft, "sglang", norm_before_fc=True, eagle_aux_hidden_state_layer_ids=[4, 6, 9])
    (raw := json.loads((beyond / "config.json").read_text())).pop("eagle_config")
    (beyond / "config.json").write_text(json.dumps(raw))
    with pytest.raises(e3.WiringError, match="tap 9 does not exist: the target has 8 blocks"):
        e3.load_draft(beyond, target=tiny_target)


# --- a draft that reads the last hidden state only [2, 7, 29]


@pytest.mark.parametrize("has_fc", [True, False])
def test_a_draft_without_auxiliary_states(tmp_path: Path, tiny_target, has_fc: bool) -> None:
    draft = random_draft(tiny_target, taps=(8,), use_aux_hidden_state=False, has_fc=has_fc)
    folder = write(tmp_path / "draft", draft, "sglang", eagle_config={"use_aux_hidden_state": False})
    with pytest.raises(UnknownTaps, match="use_aux_hidden_state false.*--taps"):
        e3.load_draft(folder)
    assert e3.load_draft(folder, taps=[8]).missing == ["embed_tokens", "target_norm"]
    loaded = e3.load_draft(folder, target=tiny_target)
    assert loaded.config == draft.config
    out = tiny_target.forward(ids_of(0, 1, 5), taps=loaded.taps)
    got = loaded.graph.merge(loaded.params).project(out.taps)
    model = tiny_target.graph.merge(tiny_target.params)
    expected = model.model.norm(out.last_hidden)  # after the target's final norm, as the servers feed it
    if has_fc:
        expected = expected @ loaded.params["fc"]["weight"].T
    assert relative(got, expected) < 1e-6
    e3.save_draft(loaded, tmp_path / "again")
    assert "target_norm.weight" not in load_file(tmp_path / "again" / "model.safetensors")
    again = e3.load_draft(tmp_path / "again")
    assert again.config == draft.config and again.missing == ["target_norm"]


def test_one_feature_without_a_word_about_it_is_refused(tmp_path: Path, tiny_target) -> None:
    draft = random_draft(tiny_target, taps=(8,), use_aux_hidden_state=False)
    folder = write(tmp_path / "draft", draft, "sglang", eagle_config=None)
    with pytest.raises(UnknownTaps):
        e3.load_draft(folder)
    assert e3.load_draft(folder, taps=[5]).config.use_aux_hidden_state


# --- other kinds are refused by name [7, 58, 72]

KINDS = {
    "P-EAGLE": ({}, {"mask_hidden": np.ones((1, 1, 192), np.float32)}),
    "P-EAGLE ": ({"pard_token": 5}, {}),
    "Medusa": ({"eagle_config": {"parallel_draft_step": 4}}, {}),
    "MLA": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}),
    "DFlash": ({"dflash_config": {}}, {}),
    "EAGLE-1": (
        {"draft_vocab_size": None},
        {"fc.weight": np.ones((64, 128), np.float32), "midlayer.hidden_norm.weight": None, "lm_head.weight": None},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_draft_are_refused_by_name(tmp_path: Path, tiny_draft, kind: str) -> None:
    changes, tensors = KINDS[kind]
    folder = write(tmp_path / "draft", tiny_draft, "sglang", tensors=tensors, **changes)
    with pytest.raises(e3.UserError, match=f"this is a {kind.strip()}.* draft, which is not supported"):
        e3.load_draft(folder)


def test_other_kinds_in_speculators_layout_are_refused_by_name(tmp_path: Path, tiny_draft) -> None:
    folder = write(tmp_path / "a", tiny_draft, "speculators", speculators_model_type="peagle", mask_token_id=3)
    with pytest.raises(e3.UserError, match=r"P-EAGLE \(parallel drafting\) draft"):
        e3.load_draft(folder)
    for i, (changes, tensors, kind) in enumerate(
        [
            ({}, {"mask_hidden": np.ones((1, 1, 192), np.float32)}, "P-EAGLE"),
            ({"mask_token_id": 3}, {}, "P-EAGLE"),
            ({"eagle_config": {"parallel_draft_step": 4}}, {}, "Medusa"),
        ]
    ):
        folder = write(tmp_path / f"kind{i}", tiny_draft, "speculators", tensors=tensors, **changes)
        with pytest.raises(e3.UserError, match=f"this is a {kind}.* draft, which is not supported"):
            e3.load_draft(folder)
    with pytest.raises(e3.UserError, match=r"not an EAGLE-3 draft .*\(dflash\)"):
        e3.load_draft(write(tmp_path / "b", tiny_draft, "speculators", speculators_model_type="dflash"))


def test_keys_of_sglang_in_speculators_layout(tmp_path: Path, tiny_draft) -> None:
    assert list(e3.load_draft(write(tmp_path / "a", tiny_draft, "speculators", num_aux_hidden_states=3)).taps) == TAPS
    for i, (changes, message) in enumerate(
        [
            ({"num_aux_hidden_states": 4}, "num_aux_hidden_states 4 but 3 taps"),
            ({"eagle_config": {"use_last_layernorm": False}}, "eagle_config.use_last_layernorm False"),
            ({"eagle_config": {"use_mtp": 1}}, "not understood: use_mtp"),
            ({"eagle_config": {"norm_before_fc": True}}, r"missing: input_norm\.weight"),
            ({"eagle_config": {"norm_before_fc": True}, "norm_before_fc": False}, "norm_before_fc twice"),
        ]
    ):
        with pytest.raises(e3.UserError, match=message):
            e3.load_draft(write(tmp_path / str(i), tiny_draft, "speculators", **changes))


def test_a_target_is_no_draft(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(e3.UserError, match=r"no EAGLE-3 draft .*LlamaForCausalLM.* is it the target\?"):
        e3.load_draft(tiny_folder)
    with pytest.raises(e3.UserError, match="not a draft folder"):
        e3.load_draft(write_target(tmp_path / "t", num_hidden_layers=1) / "config.json")


# --- flags and keys: used or refused [13, 32, 33, 34, 38, 115, 123]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_outptu": True}, "not understood: norm_outptu"),
        ({"rope_interleaved": True}, "rope_interleaved / only the half-split"),
        ({"sliding_window": 8, "use_sliding_window": True}, "sliding_window 8 but no layer_types"),
        ({"logit_scale": 0.5}, "logit_scale 0.5"),
        ({"norm_output": False}, "norm_output false: SGLang and vLLM .* SpecForge leaves out the final norm"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": "4,2,2"}}, "mrope_section .* list of positive integers"),
        ({"norm_before_fc": True, "fc_norm": True}, "both on"),
        ({"norm_before_fc": True}, r"missing: input_norm\.weight"),
        ({"fc_norm": True}, r"missing: fc_norm\.0\.weight, fc_norm\.1\.weight, fc_norm\.2\.weight"),
        ({"bias": True}, r"missing: fc\.bias"),
        ({"attention_bias": True}, r"missing: .*q_proj\.bias"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2 but the file holds tensors of 1 layers"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000"),  # before anything so large is made
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states 4 but 3 taps"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_last_layernorm": False}}, "use_last"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_mtp": 1}}, "not understood: use_mtp"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with 'fp8'"),
    ],
)
def test_what_the_file_says_is_used_or_refused(tmp_path: Path, tiny_draft, changes: dict, message: str) -> None:
    with pytest.raises(e3.UserError, match=message) as caught:
        e3.load_draft(write(tmp_path / "draft", tiny_draft, "sglang", **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({"eagle_aux_hidden_state_layer_ids": ids}, "must be a list of numbers")
            for ids in (["1"], [None], [[1]], 3)
        ],
        *[({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, "list of numbers") for ids in (["1"], [[1]])],
        *[({"eagle3_jax": {"taps": taps}}, "eagle3_jax.taps is .* list of numbers") for taps in ("246", [2.5], {})],
        ({"eagle_config": [1]}, "eagle_config must be an object"),
        ({"eagle3_jax": "x"}, "eagle3_jax must be an object"),
        ({"architectures": [None]}, "architectures must be a list of names"),
        ({"speculators_config": {"verifier": "org/t", "proposal_methods": [3]}}, "verifier must be .*proposal_methods"),
        ({"norm_before_fc": "false"}, "norm_before_fc must be true or false"),
        (
            {"eagle_config": {"use_aux_hidden_state": "false"}},
            "eagle_config.use_aux_hidden_state must be true or false",
        ),
        ({"draft_vocab_size": "128"}, "draft_vocab_size must be a count"),
        ({"target_hidden_size": [64]}, "target_hidden_size must be a count"),
        ({"eagle3_jax": {"target": 5}}, "eagle3_jax.target and its fingerprint must be objects"),
        ({"eagle3_jax": {"target": {"fingerprint": 5}}}, "eagle3_jax.target and its fingerprint must be objects"),
        ({"eagle3_jax": {"target": {"fingerprint": {"sample": ["a"]}}}}, "sample must be a list of numbers"),
        ({"eagle3_jax": {"verifier": "org/t", "speculative_tokens": 0}}, "verifier must be .*speculative_tokens must"),
        ({"speculators_config": {"verifier": {"name_or_path": 5}}}, "name_or_path must be text"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": -3}]}}, "speculative_tokens must be a"),
    ],
)
def test_values_of_another_type_are_one_line(tmp_path: Path, tiny_draft, layout: str, changes, message: str) -> None:
    with pytest.raises((e3.UserError, e3.WiringError), match=message) as caught:
        e3.load_draft(write(tmp_path / "draft", tiny_draft, layout, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_attention_heads", 0), ("hidden_size", -64), ("num_key_value_heads", 3), ("head_dim", "16")),
        *(("attention_bias", "false"), ("rms_norm_eps", "1e-5"), ("layer_types", 3), ("quantization_config", "fp8")),
        ("max_position_embeddings", [128]),
        *(("head_dim", 0), ("max_position_embeddings", 0), ("rms_norm_eps", -1), ("rms_norm_eps", float("nan"))),
    ],
)
def test_sizes_that_mean_nothing_are_one_line(key: str, value) -> None:
    with pytest.raises(e3.UserError, match=f"{key} {value!r}|4 attention heads".replace("[", r"\[")):
        decoder_config(target_config(**{key: value}))


def test_a_layer_config_that_is_no_object(tmp_path: Path, tiny_draft) -> None:
    for i, (value, message) in enumerate([([1], "must be an object"), ({"model_type": ["llama"]}, "model_type")]):
        folder = write(tmp_path / str(i), tiny_draft, "speculators", transformer_layer_config=value)
        with pytest.raises(e3.UserError, match=message):
            e3.load_draft(folder)


@pytest.mark.parametrize("kind", [np.int8, np.float64, bool])
def test_weights_in_another_kind_of_number_are_one_line(tmp_path: Path, tiny_draft, kind) -> None:
    """A quantised export without its scales, for example."""
    folder = write(tmp_path / "draft", tiny_draft, "sglang", tensors={"fc.weight": np.ones((64, 192), kind)})
    with pytest.raises(e3.UserError, match=r"fc\.weight is .* weights must be float32, float16, bfloat16"):
        e3.load_draft(folder)


@pytest.mark.parametrize("layer", ["99999999", "3", "x", "9" * 5000])
def test_tensors_of_a_layer_that_is_none(tmp_path: Path, tiny_draft, layer: str) -> None:
    """The research layout counts layers by the tensors: an absurd number must not build as many."""
    extra = {f"layers.{layer}.input_layernorm.weight": np.ones(64, np.float32)}
    with pytest.raises(e3.UserError, match=r"not used: |num_hidden_layers is"):
        e3.load_draft(write(tmp_path / "draft", tiny_draft, "safeailab", tensors=extra), taps=[2, 4, 6])


def test_a_missing_shard_is_named_without_an_index_too(tmp_path: Path, tiny_draft) -> None:
    folder = write(tmp_path / "draft", tiny_draft, "sglang")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(e3.UserError, match=r"lacks the weight file\(s\) model-00002-of-00002\.safetensors"):
        e3.load_draft(folder)


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "d2t", "t2d"])
def test_tensors_of_no_dimension_are_one_line(tmp_path: Path, tiny_draft, name: str) -> None:
    kind = np.int64 if name in ("d2t", "t2d") else np.float32
    folder = write(tmp_path / "draft", tiny_draft, "sglang")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: np.ones((), kind)}, folder / "model.safetensors")
    with pytest.raises(e3.UserError, match=rf"{name} has (shape \[\]|1 entries)"):
        e3.load_draft(folder)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
@pytest.mark.parametrize("layout", ["speculators", "sglang"])
def test_every_flag_is_read(tmp_path: Path, tiny_target, layout: str, flag: str) -> None:
    draft = random_draft(tiny_target, **{flag: True})
    assert e3.load_draft(write(tmp_path / "draft", draft, layout, **{flag: True})).config == draft.config


def test_the_residual_flag_must_be_stated_where_systems_disagree(tmp_path: Path, tiny_draft) -> None:
    folder = write(tmp_path / "a", tiny_draft, "speculators", norm_before_residual=None)
    with pytest.raises(e3.UserError, match="lacks norm_before_residual, which speculators takes for false and vLLM"):
        e3.load_draft(folder)
    assert not e3.load_draft(write(tmp_path / "b", tiny_draft, "safeailab"), taps=TAPS).config.norm_before_residual


def test_the_layer_count_of_a_target_in_a_research_draft(tmp_path: Path, tiny_draft) -> None:
    """The published draft of Vicuna-13B says 40 layers, its target's, and has one."""
    folder = write(tmp_path / "draft", tiny_draft, "safeailab", num_hidden_layers=40)
    assert e3.load_draft(folder, taps=TAPS).config.decoder.num_layers == 1
    folder = write(tmp_path / "bias", tiny_draft, "safeailab", bias=True)  # read by its code, and not used
    assert not e3.load_draft(folder, taps=TAPS).config.fc_bias


def test_keys_that_speculators_leaves_out_mean_its_defaults(tmp_path: Path, tiny_target) -> None:
    layer = dict(CONFIGS["speculators"]["transformer_layer_config"], max_position_embeddings=2048)
    del layer["rope_theta"], layer["num_hidden_layers"], layer["max_position_embeddings"]
    layer.pop("hidden_act")
    draft = random_draft(tiny_target, layer={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    folder = write(tmp_path / "draft", draft, "speculators", transformer_layer_config={**layer, "num_hidden_layers": 1})
    decoder = e3.load_draft(folder).config.decoder
    assert (decoder.rope.theta, decoder.max_positions) == (10000.0, 2048)
    qwen = random_draft(tiny_target, layer={"model_type": "qwen3", "head_dim": 128, "num_attention_heads": 32})
    layer = {k: v for k, v in layer.items() if k not in ("head_dim", "num_attention_heads")}
    folder = write(
        tmp_path / "qwen",
        qwen,
        "speculators",
        transformer_layer_config={**layer, "model_type": "qwen3", "num_hidden_layers": 1},
    )
    decoder = e3.load_draft(folder).config.decoder
    assert (decoder.head_dim, decoder.num_heads, decoder.max_positions, decoder.qk_norm) == (128, 32, 32768, True)


# --- rope [35, 36]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    ],
    ids=["transformers 4", "transformers 5"],
)
@pytest.mark.parametrize("layout", ["speculators", "sglang", "safeailab"])
def test_rope_scaling_is_read_in_both_styles(tmp_path: Path, tiny_draft, layout: str, keys: dict) -> None:
    if layout == "speculators":
        layer = {**CONFIGS[layout]["transformer_layer_config"], **keys}
        changes = {"transformer_layer_config": {k: v for k, v in layer.items() if v is not None}}
    else:
        changes = keys
    rope = e3.load_draft(write(tmp_path / "draft", tiny_draft, layout, **changes), taps=TAPS).config.decoder.rope
    expected = decoder_config(target_config(head_dim=16, rope_parameters={**LLAMA3, "rope_theta": 500000.0})).rope
    positions = jnp.asarray([[0, 100, 9000]])
    for got, reference in zip(rotary(rope, positions), rotary(expected, positions), strict=True):
        np.testing.assert_array_equal(got, reference)


def test_keys_of_transformers_that_are_about_generating_are_harmless(tmp_path: Path, tiny_draft) -> None:
    """`json.dump(config.to_dict())` with transformers 4 writes them all."""
    keys = {"max_length": 20, "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0}
    more = {"length_penalty": 1.0, "repetition_penalty": 1.0, "num_return_sequences": 1, "num_beam_groups": 1}
    assert e3.load_draft(write(tmp_path / "draft", tiny_draft, "sglang", **keys, **more)).config == tiny_draft.config


def test_rope_of_each_layer_type(tmp_path: Path, tiny_draft) -> None:
    """speculators would take the sliding layers' rotation for all; only equal ones mean the same everywhere."""
    one, other = ({"rope_type": "default", "rope_theta": theta} for theta in (500000.0, 10000.0))
    layer = {**CONFIGS["speculators"]["transformer_layer_config"]}
    del layer["rope_theta"]
    equal = {**layer, "rope_parameters": {"full_attention": one, "sliding_attention": one}}
    loaded = e3.load_draft(write(tmp_path / "a", tiny_draft, "speculators", transformer_layer_config=equal))
    assert loaded.config.decoder.rope.theta == 500000.0
    differing = {**layer, "rope_parameters": {"full_attention": one, "sliding_attention": other}}
    with pytest.raises(e3.UserError, match="differ by layer type"):
        e3.load_draft(write(tmp_path / "b", tiny_draft, "speculators", transformer_layer_config=differing))

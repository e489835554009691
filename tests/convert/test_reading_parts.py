"""Vocabulary maps and missing parts of other systems' drafts through `e3.load_draft`.

Numbers in brackets are entries of ../shared/spec/field-bugs.md: [10, 12, 15 of spec 8, 44, 51, 52, 53].
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax.draft.draft import stored_tensors
from tests.convert.folders import FLAT, LAYOUTS, TAPS, same_tensors, write
from tests.tiny import SCATTERED, random_draft, write_target
from tests.torch_files import write_torch


def test_a_map_in_another_order_without_t2d(tmp_path: Path, tiny_target) -> None:
    order = np.random.default_rng(0).permutation(SCATTERED)
    draft = random_draft(tiny_target, d2t=order)
    loaded = e3.load_draft(write(tmp_path / "draft", draft, "modelopt"))
    np.testing.assert_array_equal(loaded.d2t, order)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reduced_vocabulary_needs_its_map(tmp_path: Path, tiny_draft, layout: str) -> None:
    folder = write(tmp_path / "draft", tiny_draft, layout, tensors={"d2t": None})
    with pytest.raises(e3.UserError, match="128 of 512 tokens but there is no d2t"):
        e3.load_draft(folder, taps=TAPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_map_that_was_never_filled_in_is_refused(tmp_path: Path, tiny_draft, layout: str) -> None:
    zeros = {"d2t": np.zeros(128, np.int64), "t2d": None}
    with pytest.raises(e3.UserError, match=r"d2t is all zeros.* first 128 of 512.*no t2d to confirm it"):
        e3.load_draft(write(tmp_path / "a", tiny_draft, layout, tensors=zeros), taps=TAPS)
    confirmed = {"d2t": np.zeros(128, np.int64), "t2d": np.arange(512) < 128}
    loaded = e3.load_draft(write(tmp_path / "b", tiny_draft, layout, tensors=confirmed), taps=TAPS)
    np.testing.assert_array_equal(loaded.d2t, np.arange(128))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_vocabulary(tmp_path: Path, tiny_target, layout: str) -> None:
    draft = random_draft(tiny_target, d2t=np.arange(512))
    everything = {"t2d": np.ones(512, bool)}
    for i, (size, tensors) in enumerate(
        [
            (512, {}),
            (None, {}),
            (512, {"d2t": np.zeros(512, np.int64)}),
            (512, {"d2t": np.zeros(512, np.int64), **everything}),
        ]
    ):
        folder = write(tmp_path / str(i), draft, layout, tensors=tensors, draft_vocab_size=size)
        np.testing.assert_array_equal(e3.load_draft(folder, taps=TAPS).d2t, np.arange(512))
    absolute = write(tmp_path / "absolute", draft, layout, tensors={"d2t": np.arange(512)}, draft_vocab_size=512)
    with pytest.raises(e3.UserError, match="look like absolute target ids"):
        e3.load_draft(absolute, taps=TAPS)


def test_the_vocabulary_size_is_the_number_of_head_rows(tmp_path: Path, tiny_draft) -> None:
    folder = write(tmp_path / "a", tiny_draft, "safeailab", draft_vocab_size=None)
    assert e3.load_draft(folder, taps=TAPS).config.draft_vocab_size == 128
    folder = write(tmp_path / "b", tiny_draft, "safeailab", draft_vocab_size=100)
    with pytest.raises(e3.UserError, match="d2t has 128 entries, draft_vocab_size is 100"):
        e3.load_draft(folder, taps=TAPS)


def test_a_missing_head_is_borrowed_only_for_the_full_vocabulary(tmp_path: Path, tiny_target, tiny_draft) -> None:
    full = random_draft(tiny_target, d2t=np.arange(512))
    folder = write(tmp_path / "a", full, "sglang", tensors={"lm_head.weight": None}, draft_vocab_size=512)
    loaded = e3.load_draft(folder)
    assert loaded.missing == ["embed_tokens", "lm_head"]
    bound = loaded.bind(tiny_target)
    np.testing.assert_array_equal(bound.params["lm_head"]["weight"], tiny_target.params["lm_head"]["weight"])
    folder = write(tmp_path / "b", tiny_draft, "sglang", tensors={"lm_head.weight": None})
    with pytest.raises(e3.UserError, match=r"missing: lm_head\.weight"):
        e3.load_draft(folder)


def test_a_tied_head_is_the_drafts_own_embedding(tmp_path: Path, tiny_target) -> None:
    full = random_draft(tiny_target, d2t=np.arange(512))
    table = stored_tensors(full)["embed_tokens.weight"]
    changes = {"tie_word_embeddings": True, "draft_vocab_size": 512}
    tensors = {"lm_head.weight": None, "embed_tokens.weight": table}
    loaded = e3.load_draft(write(tmp_path / "a", full, "sglang", tensors=tensors, **changes))
    np.testing.assert_array_equal(loaded.params["lm_head"]["weight"], table)
    with pytest.raises(e3.UserError, match="neither lm_head nor embed_tokens"):
        e3.load_draft(write(tmp_path / "b", full, "sglang", tensors={"lm_head.weight": None}, **changes))


def test_a_draft_narrower_than_its_target(tmp_path: Path) -> None:
    target = e3.load_target(write_target(tmp_path / "target", hidden_size=128, num_hidden_layers=2), dtype="float32")
    layer = {"head_dim": 32, "num_key_value_heads": 2}
    draft = random_draft(target, taps=(0, 1, 2), layer=layer)
    assert draft.params["fc"]["weight"].shape == (64, 384)
    assert draft.params["layers"][0]["self_attn"]["q_proj"]["weight"].shape == (128, 128)
    assert draft.params["layers"][0]["self_attn"]["o_proj"]["weight"].shape == (64, 128)
    table = {"embed_tokens.weight": stored_tensors(draft)["embed_tokens.weight"]}
    changes = {**layer, "target_hidden_size": 128, "eagle_config": None}
    folder = write(tmp_path / "draft", draft, "safeailab", tensors=table, **changes)
    loaded = e3.load_draft(folder, taps=[0, 1, 2], target=target)
    assert loaded.config == draft.config
    same_tensors(loaded, stored_tensors(draft))  # its own embedding, not the target's
    lacking = write(tmp_path / "lacking", draft, "safeailab", **changes)
    with pytest.raises(e3.UserError, match="stores no embedding and its hidden size differs from the target's"):
        e3.load_draft(lacking, taps=[0, 1, 2], target=target)


def test_the_golden_research_draft_is_read_without_torch(golden) -> None:
    draft = e3.load_draft(golden("convert/safeailab_bin"), taps=[2, 4, 5])
    expected = load_file(golden("convert/out_flags") / "model.safetensors")  # the library's own conversion of it
    assert len(expected) == 15 and str(draft.dtype) == "float16"
    same_tensors(draft, expected)
    assert FLAT["hidden_size"] == draft.config.target_hidden_size


def test_two_files_of_weights_must_agree(tmp_path: Path, tiny_draft) -> None:
    folder = write(tmp_path / "draft", tiny_draft, "safeailab")
    tensors = load_file(folder / "model.safetensors")
    write_torch(folder / "pytorch_model.bin", tensors)
    e3.load_draft(folder, taps=TAPS)
    write_torch(folder / "pytorch_model.bin", tensors | {"norm.weight": tensors["norm.weight"] * 2})
    with pytest.raises(e3.UserError, match=r"pytorch_model\.bin and model\.safetensors differ in norm\.weight"):
        e3.load_draft(folder, taps=TAPS)


def test_a_missing_shard_of_torch_files_is_named(tmp_path: Path, tiny_draft) -> None:
    folder = write(tmp_path / "draft", tiny_draft, "safeailab")
    tensors = load_file(folder / "model.safetensors")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "pytorch_model-00001-of-00002.bin")}))
    e3.load_draft(folder, taps=TAPS)  # an index alone is what a conversion to safetensors leaves
    (folder / "model.safetensors").rename(tmp_path / "away")
    index.unlink()
    names = list(tensors)
    write_torch(folder / "pytorch_model-00001-of-00002.bin", {name: tensors[name] for name in names[:5]})
    with pytest.raises(e3.UserError, match=r"lacks the weight file\(s\) pytorch_model-00002-of-00002\.bin"):
        e3.load_draft(folder, taps=TAPS)
    write_torch(folder / "pytorch_model-00002-of-00002.bin", {name: tensors[name] for name in names[5:]})
    assert len(stored_tensors(e3.load_draft(folder, taps=TAPS))) == len(tensors)


def test_float64_would_lose_bits_and_is_refused(tmp_path: Path, tiny_draft) -> None:
    folder = write(tmp_path / "draft", tiny_draft, "sglang", tensors={"norm.weight": np.ones(64, np.float64)})
    with pytest.raises(e3.UserError, match=r"norm\.weight is float64"):
        e3.load_draft(folder)

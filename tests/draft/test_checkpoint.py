"""Draft folders: a bit-equal round trip, strict reading, and writing that is complete or leaves nothing."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax.draft import folder as module
from eagle3_jax.models.weights import flatten
from tests.tiny import SCATTERED, ids_of, random_draft, write_target


def assert_same(a: e3.Draft, b: e3.Draft) -> None:
    assert a.config == b.config
    np.testing.assert_array_equal(a.d2t, b.d2t)
    left, right = flatten(a.params), flatten(b.params)
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype
        np.testing.assert_array_equal(np.asarray(array), np.asarray(right[name]), err_msg=name)


@pytest.fixture
def saved(tmp_path: Path, tiny_draft) -> Path:
    e3.save_draft(tiny_draft, tmp_path / "draft")
    return tmp_path / "draft"


def edit_config(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, array in changes.items():
        name = name.replace("__", ".")
        if array is None:
            del tensors[name]
        else:
            tensors[name] = array
    save_file(tensors, folder / "model.safetensors")


VARIANTS = {
    "plain": {},
    "taps in another order": {"taps": (6, 0, 4)},
    "norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "fc_norm": {"fc_norm": True, "taps": (1, 2, 3, 8)},
    "two layers": {"layers": 2},
    "full vocabulary": {"d2t": np.arange(512)},
    "full vocabulary in another order": {"d2t": np.random.default_rng(0).permutation(512)},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_saving_and_loading_are_inverse(tmp_path: Path, tiny_target, variant: dict) -> None:
    draft = random_draft(tiny_target, **variant)
    e3.save_draft(draft, tmp_path / "draft")
    again = e3.load_draft(tmp_path / "draft")
    assert_same(draft, again)
    assert again.facts["target"]["fingerprint"] == tiny_target.fingerprint
    e3.save_draft(again, tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "draft" / file).read_bytes()


def test_bfloat16_survives(tmp_path: Path, tiny_draft) -> None:
    half = tiny_draft.with_params(jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny_draft.params))
    e3.save_draft(half, tmp_path / "half")
    assert_same(half, e3.load_draft(tmp_path / "half"))
    assert e3.load_draft(tmp_path / "half", dtype="float32").dtype == jnp.float32
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_golden_draft_of_speculators_comes_back_tensor_for_tensor(tmp_path: Path, golden) -> None:
    folder = golden("drafts/base")
    e3.save_draft(e3.load_draft(folder), tmp_path / "again")
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype
        np.testing.assert_array_equal(array, after[name])
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "targets/llama_gqa"


def test_the_vocabulary_map_on_disk(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(128), SCATTERED)  # offsets, not absolute ids
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), SCATTERED)


# --- taps


def test_a_draft_without_taps_is_refused_unless_they_are_given(saved: Path) -> None:
    edit_config(saved, eagle_aux_hidden_state_layer_ids=None, eagle3_jax={})
    with pytest.raises(e3.WiringError, match="does not say which target layers"):
        e3.load_draft(saved)
    assert e3.load_draft(saved, taps=[3, 5, 7]).taps == e3.TapSet([3, 5, 7])


def test_taps_that_contradict_the_file_are_refused(saved: Path) -> None:
    assert e3.load_draft(saved, taps=[2, 4, 6]).taps == e3.TapSet([2, 4, 6])
    with pytest.raises(e3.WiringError, match=r"expected \[block 2 input, block 4 .*got \[block 4 input, block 2"):
        e3.load_draft(saved, taps=[4, 2, 6])


@pytest.mark.parametrize("ids", [[2, 4, 6, 7], [2, 4]])
def test_a_count_of_taps_that_fc_does_not_have_is_refused(saved: Path, ids: list[int]) -> None:
    edit_config(saved, eagle_aux_hidden_state_layer_ids=ids, eagle3_jax={})
    with pytest.raises(e3.UserError, match=rf"names {len(ids)} taps .* but fc\.weight is 192 wide, which is 3 taps"):
        e3.load_draft(saved)


def test_a_config_with_a_byte_order_mark_is_read_and_one_with_two_values_of_a_key_is_not(saved: Path) -> None:
    file = saved / "config.json"
    text = file.read_text()
    file.write_text(text, encoding="utf-8-sig")
    assert e3.load_draft(saved).taps == e3.TapSet([2, 4, 6])
    file.write_text('{"eagle_aux_hidden_state_layer_ids": [2, 4, 5],' + text.lstrip().removeprefix("{"))
    with pytest.raises(e3.UserError, match="the key 'eagle_aux_hidden_state_layer_ids' twice"):
        e3.load_draft(saved)


# --- the vocabulary map


def test_a_reduced_vocabulary_without_map_is_refused(saved: Path) -> None:
    edit_tensors(saved, d2t=None)
    with pytest.raises(e3.UserError, match="128 of 512 tokens but there is no d2t"):
        e3.load_draft(saved)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.arange(128) * 3 + 300, "outside 0..511"),
        (np.full(128, -1), "outside 0..511"),
        (SCATTERED, "look like absolute target ids"),
        (np.zeros(128), "d2t and t2d disagree"),
        (np.zeros(127), "d2t has 127 entries, draft_vocab_size is 128"),
    ],
)
def test_a_broken_map_is_refused(saved: Path, offsets: np.ndarray, message: str) -> None:
    edit_tensors(saved, d2t=offsets.astype(np.int64))
    with pytest.raises(e3.UserError, match=message):
        e3.load_draft(saved)


def test_a_map_without_t2d_is_enough(saved: Path) -> None:
    edit_tensors(saved, t2d=None)
    np.testing.assert_array_equal(e3.load_draft(saved).d2t, SCATTERED)


# --- strictness


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm__weight": None}, r"missing: norm\.weight"),
        ({"lm_head__weight": None}, r"missing: lm_head\.weight"),
        ({"input_norm__weight": np.ones(192, np.float32)}, r"not used: input_norm\.weight"),
        ({"fc__bias": np.ones(64, np.float32)}, r"not used: fc\.bias"),
        ({"lm_head__weight": np.ones((127, 64), np.float32)}, r"lm_head\.weight has shape \[127, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(saved: Path, change: dict, message: str) -> None:
    edit_tensors(saved, **change)
    with pytest.raises(e3.UserError, match=message) as caught:
        e3.load_draft(saved)
    assert "\n" not in str(caught.value)


def test_a_norm_flag_without_its_weight_is_refused(saved: Path) -> None:
    edit_config(saved, norm_before_fc=True)
    with pytest.raises(e3.UserError, match=r"missing: input_norm\.weight"):
        e3.load_draft(saved)


def test_a_torn_file_is_refused(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(e3.UserError, match="torn"):
        e3.load_draft(saved)


# --- writing


def test_a_failed_save_leaves_nothing(tmp_path: Path, tiny_draft, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half a fi")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(e3.UserError, match="cannot write the draft / .*draft / No space left on device"):
        e3.save_draft(tiny_draft, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_older_draft(saved: Path, tiny_draft, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(e3.UserError):
        e3.save_draft(tiny_draft, saved)
    assert_same(e3.load_draft(saved), tiny_draft)
    assert [p.name for p in saved.parent.iterdir()] == ["draft"]


def test_an_older_draft_is_replaced_as_a_whole(saved: Path, tiny_target) -> None:
    (saved / "pytorch_model.bin").write_text("from the older draft")
    newer = random_draft(tiny_target, seed=7)
    e3.save_draft(newer, saved)
    assert_same(e3.load_draft(saved), newer)
    assert sorted(p.name for p in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in saved.parent.iterdir()] == ["draft"]


def test_an_older_draft_with_other_things_beside_it_is_kept(saved: Path, tiny_draft, monkeypatch) -> None:
    for name in ("thesis.txt", "checkpoints"):
        other = saved / name
        other.mkdir() if name == "checkpoints" else other.write_text("years of work")
        with pytest.raises(e3.UserError, match=f"holds more than a draft, {name}, which would be lost"):
            e3.save_draft(tiny_draft, saved)
        assert other.exists() and (saved / "model.safetensors").exists()
        other.rmdir() if name == "checkpoints" else other.unlink()
    monkeypatch.chdir(saved)
    for place in (".", "..", saved):
        with pytest.raises(e3.UserError, match="current folder or above it"):
            e3.save_draft(tiny_draft, place)
    monkeypatch.chdir(saved.parent)
    link = saved.parent / "link"
    link.symlink_to(saved)
    e3.save_draft(tiny_draft, link)
    assert link.is_symlink() and sorted(p.name for p in saved.parent.iterdir()) == ["draft", "link"]


def test_an_older_draft_comes_back_when_the_new_one_cannot_take_its_place(saved: Path, tiny_draft, monkeypatch) -> None:
    replace, moves = module.os.replace, []

    def second_fails(a, b):
        moves.append(a)
        if len(moves) == 2:
            raise OSError(5, "Input/output error")
        replace(a, b)

    monkeypatch.setattr(module.os, "replace", second_fails)
    with pytest.raises(e3.UserError, match="Input/output error"):
        e3.save_draft(tiny_draft, saved)
    assert [p.name for p in saved.parent.iterdir()] == ["draft"] and (saved / "config.json").exists()


def test_a_folder_that_is_no_draft_is_never_replaced(tmp_path: Path, tiny_draft) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    model = write_target(tmp_path / "model", num_hidden_layers=1, vocab_size=40)
    file = tmp_path / "file"
    file.write_text("x")
    for place in (notes, model):
        with pytest.raises(e3.UserError, match="exists and is no draft folder"):
            e3.save_draft(tiny_draft, place)
    with pytest.raises(e3.UserError, match="cannot write the draft"):
        e3.save_draft(tiny_draft, file)
    assert (notes / "thesis.txt").read_text() == "years of work" and (model / "model.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model", "notes"]


def test_parents_are_made_and_an_empty_folder_is_filled(tmp_path: Path, tiny_draft) -> None:
    e3.save_draft(tiny_draft, tmp_path / "a" / "b")
    (tmp_path / "empty").mkdir()
    e3.save_draft(tiny_draft, tmp_path / "empty")
    assert_same(e3.load_draft(tmp_path / "a" / "b"), e3.load_draft(tmp_path / "empty"))


def test_loading_twice_gives_the_same_numbers(saved: Path, tiny_draft) -> None:
    taps = e3.Taps([jnp.ones((1, 6, 64)) * k for k in (1, 2, 3)], e3.TapSet([2, 4, 6]))
    ids = ids_of(0, 1, 6)
    a, b = (draft.ttt_forward(taps, ids, 1)[0] for draft in (tiny_draft, e3.load_draft(saved)))
    np.testing.assert_array_equal(a, b)

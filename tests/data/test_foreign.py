"""Samples of others: what each format holds, what does not fit together, and what a state looks like."""

import gzip
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3_jax.data import foreign
from eagle3_jax.data.foreign.identify import looks, measure
from eagle3_jax.data.foreign.inspection import inspect_features
from eagle3_jax.errors import UserError
from tests.tiny import ids_of
from tests.torch_files import torch_bytes, write_torch

FILES = Path(__file__).parents[1] / "golden" / "foreign"
STATES = np.random.default_rng(0).standard_normal((4, 7, 4)).astype(np.float32).astype(ml_dtypes.bfloat16)
IDS, MASK = np.arange(10, 17), np.array([0, 0, 1, 1, 1, 0, 1])
COMMON = {"input_ids": IDS, "loss_mask": MASK}


@pytest.mark.parametrize(
    "file, name, last_is_named",
    [
        ("speculators_v1.pt", "speculators v1", False),
        ("speculators_v0.pt", "speculators v0", True),
        ("specforge.ckpt", "SpecForge", True),
        ("specforge.ckpt.gz", "SpecForge", True),
        ("modelopt.pt", "ModelOpt", True),
    ],
)
def test_files_of_torch(file, name, last_is_named):
    sample = foreign.open_sample(FILES / file)
    assert sample.format.startswith(name) and sample.last_is_named == last_is_named
    assert sample.input_ids.tolist() == IDS.tolist() and sample.loss_mask.tolist() == MASK.astype(bool).tolist()
    assert len(sample.state_names) == 4 and sample.hidden_size == 4
    for got, expected in zip(sample.states(), STATES, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_hs_files(tmp_path):
    file = tmp_path / "hs_0.safetensors"
    save_file({"token_ids": IDS, "hidden_states": np.ascontiguousarray(STATES.swapaxes(0, 1))}, file)
    sample = foreign.open_sample(file)
    assert sample.loss_mask is None and sample.state_names == tuple(f"hidden_states[:, {i}]" for i in range(4))
    for got, expected in zip(sample.states(), STATES, strict=True):
        np.testing.assert_array_equal(got, expected)
    file.write_bytes(file.read_bytes()[:-4])  # after it was opened
    with pytest.raises(UserError, match=r"cannot read the file / .*hs_0\.safetensors / .*torn"):
        sample.states()
    save_file({"token_ids": IDS, "hidden_states": STATES[0]}, file)
    with pytest.raises(UserError, match="expected .T, states, H"):
        foreign.open_sample(file)
    save_file({"token_ids": IDS[:-1], "hidden_states": STATES.swapaxes(0, 1).copy()}, file)
    with pytest.raises(UserError, match="for 6 tokens"):
        foreign.open_sample(file)
    save_file({"weight": STATES[0]}, file)
    with pytest.raises(UserError, match="no stored features but tensors weight"):
        foreign.open_sample(file)
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UserError, match="torn"):
        foreign.open_sample(file)


def test_our_own_torch_files_are_those_of_torch(tmp_path):
    file = write_torch(tmp_path / "x.pt", COMMON | {"hidden_states": list(STATES)})
    for got, expected in zip(
        *(foreign.open_sample(f).states() for f in (file, FILES / "speculators_v1.pt")), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "content, complaint",
    [
        (COMMON, "of no known format .keys input_ids, loss_mask"),
        (COMMON | {"hidden_states": []}, "of no known format"),
        (COMMON | {"hidden_states": [1, 2]}, "of no known format"),
        ([1], "no sample but a list"),
        (COMMON | {"hidden_state": STATES[0], "target": STATES[0], "aux_hidden_state": STATES[0]}, "several formats"),
        (COMMON | {"hidden_states": [STATES[0], STATES[1][:5]]}, r"hidden_states\[1\] has shape \[5, 4\] for 7 tokens"),
        (COMMON | {"hidden_states": [STATES[0], STATES[1][:, :3].copy()]}, "different widths"),
        (COMMON | {"hidden_states": [STATES[0], STATES]}, r"expected \[T, H\]"),
        (COMMON | {"hidden_state": STATES[0], "aux_hidden_state": np.ones((7, 10), "f")}, "must be whole states"),
        (COMMON | {"hidden_state": STATES[0], "aux_hidden_state": np.ones((6, 8), "f")}, "for 7 tokens"),
        (COMMON | {"hidden_states": list(STATES), "loss_mask": MASK[:-1]}, "loss_mask has shape"),
        (COMMON | {"hidden_states": list(STATES), "loss_mask": MASK * 2}, "other values than 0 and 1"),
        (COMMON | {"hidden_states": list(STATES), "input_ids": STATES[0]}, "expected token ids"),
        (COMMON | {"hidden_states": list(STATES), "input_ids": IDS + (1 << 32)}, "that is no token id"),
        (
            COMMON | {"hidden_states": STATES[0], "aux_hidden_states": STATES[1], "hidden_states_prenorm": "no"},
            "true or",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, content, complaint):
    file = write_torch(tmp_path / "data_0.pt", content)
    with pytest.raises(UserError, match=complaint) as refused:
        foreign.open_sample(file)
    assert "\n" not in str(refused.value) and str(file) in str(refused.value)


def test_nothing_asked_for_but_the_last_state(tmp_path):
    """ModelOpt writes an empty tensor where no layer was asked for."""
    file = write_torch(tmp_path / "c.pt", COMMON | {"hidden_states": STATES[3], "aux_hidden_states": np.ones(0, "f")})
    sample = foreign.open_sample(file)
    assert sample.state_names == ("hidden_states",)
    np.testing.assert_array_equal(sample.states()[0], STATES[3])


def test_a_masks_ids_and_batch_axes_are_read_in_any_form(tmp_path):
    content = {"input_ids": IDS.tolist(), "loss_mask": MASK.astype(bool)[None], "hidden_states": list(STATES)}
    sample = foreign.open_sample(write_torch(tmp_path / "a.pt", content))
    assert sample.input_ids.tolist() == IDS.tolist() and sample.loss_mask.tolist() == MASK.astype(bool).tolist()


def test_folders_are_read_in_the_order_of_numbers_without_side_files(tmp_path):
    content = torch_bytes(COMMON | {"hidden_states": list(STATES)})
    for name in ("rows_0-2000/data_10.pt", "rows_0-2000/data_2.pt", "rows_2000-4000/data_2000.pt", "token_freq.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [file.name for file in foreign.sample_files(tmp_path)] == ["data_2.pt", "data_10.pt", "data_2000.pt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no stored features"):
        foreign.sample_files(tmp_path / "empty")
    with pytest.raises(UserError, match="no such file"):
        foreign.sample_files(tmp_path / "absent")


def test_torn_and_changed_files(tmp_path):
    whole = (FILES / "specforge.ckpt.gz").read_bytes()
    (tmp_path / "a.ckpt.gz").write_bytes(whole[:-20])
    with pytest.raises(UserError, match="torn"):
        foreign.open_sample(tmp_path / "a.ckpt.gz")
    file = write_torch(tmp_path / "b.pt", COMMON | {"hidden_states": list(STATES)})
    sample = foreign.open_sample(file)
    write_torch(file, COMMON | {"hidden_states": [state[:5] for state in STATES]})
    with pytest.raises(UserError, match="changed meanwhile"):
        sample.states()
    (tmp_path / "c.ckpt.gz").write_bytes(gzip.compress(b"text"))
    with pytest.raises(UserError, match="it is text|it is no zip"):
        foreign.open_sample(tmp_path / "c.ckpt.gz")


# -------------------------------------------------------------------------------------------- what a state looks like


@pytest.fixture(scope="module")
def stream(tiny_target):
    """(ids [T], states: taps 0..8 and the normed last one) of 128 random tokens, some of which come twice."""
    ids = ids_of(3, 1, 128, vocab_size=100)
    out = tiny_target.forward(ids, taps=range(9))
    norm = tiny_target.graph.merge(tiny_target.params).model.norm
    return ids[0], [np.asarray(array)[0] for array in (*out.taps.arrays, norm(out.last_hidden))]


def kinds(stream, *taps: int, tokens: int = 128) -> list[tuple[str, bool]]:
    ids, states = stream
    return [(look.like, look.certain) for look in looks([states[tap][:tokens] for tap in taps], ids[:tokens])]


def test_looks(stream):
    early, middle, late = ("early", False), ("middle", False), ("late", False)
    assert kinds(stream, 2, 4, 6, 8) == [early, middle, late, late]
    assert kinds(stream, 2, 4, 6, 9) == [early, middle, late, ("post-norm", True)]
    # The founding list: the embedding and two others were fed, the fourth was taken for the last hidden state.
    assert kinds(stream, 0, 2, 4, 6) == [("embedding", True), early, middle, late]
    assert kinds(stream, 6, 9, 0, 2) == [late, ("post-norm", True), ("embedding", True), early]
    assert kinds(stream, 5) == [("un-normed", False)]


def test_looks_with_few_tokens(stream):
    assert kinds(stream, 2, 4, 6, 9, tokens=40)[-1] == ("post-norm", False)
    assert kinds(stream, 2, 4, 6, 8, tokens=40)[-1] == ("late", False)


def test_measured_against_the_target(stream, tiny_target, tmp_path):
    ids, states = stream
    order = [6, 9, 0, 2, 8]
    noisy = [states[i] + 0.02 * np.random.default_rng(i).standard_normal(states[i].shape).astype("f") for i in order]
    file = write_torch(tmp_path / "a.pt", {"input_ids": ids, "loss_mask": ids * 0, "hidden_states": noisy})
    found = measure(foreign.open_sample(file), tiny_target)
    assert [(m.point, m.normed) for m in found] == [(6, False), (8, True), (0, False), (2, False), (8, False)]
    assert all(m.distance < 0.1 < m.second for m in found)


def test_inspection(stream, tiny_target, tmp_path):
    ids, states = stream
    aux, last = np.concatenate([states[i] for i in (2, 4, 6)], axis=-1), states[9]
    content = {"input_ids": ids, "loss_mask": ids % 2, "hidden_state": last[None], "aux_hidden_state": aux[None]}
    write_torch(tmp_path / "data_0.ckpt", content)
    found = inspect_features(tmp_path, tiny_target)
    assert (found["format"][:9], found["tokens"], found["supervised"]) == ("SpecForge", 128, int((ids % 2).sum()))
    assert [state["looks_like"] for state in found["states"]] == ["early", "middle", "late", "post-norm"]
    assert found["stored"] == {"ids": [2, 4, 6], "convention": "block-input", "last_hidden": "post-norm"}
    content = {"input_ids": ids, "loss_mask": ids % 2, "hidden_states": [states[i] for i in (0, 2, 4, 6)]}
    found = inspect_features(write_torch(tmp_path / "b.pt", content), tiny_target)
    assert [state["measured"]["words"] for state in found["states"]][:2] == ["embedding", "block 2 input"]
    assert found["stored"] is None  # no state is the last one

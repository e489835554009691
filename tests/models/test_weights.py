"""Checkpoint tensors to a parameter tree and back, strictly."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3_jax.errors import UserError
from eagle3_jax.models.weights import fill, flatten, insert, read_json, read_tensors, safetensors_files, shorten

SHAPES = {"a.weight": (2, 3), "layers.0.bias": (2,), "layers.1.bias": (2,)}


def tensors(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(SHAPES.items())} | changes


def test_filling_and_flattening_are_inverse() -> None:
    params = fill(SHAPES, tensors().items(), None, "here")
    assert set(params["layers"]) == {0, 1}  # entries of a list: integer keys
    flat = flatten(params)
    assert flat.keys() == SHAPES.keys()
    for name, array in tensors().items():
        np.testing.assert_array_equal(flat[name], array)


def test_dtype_none_keeps_each_tensors_own() -> None:
    mixed = tensors(**{"a.weight": np.zeros((2, 3), np.float16)})
    kept = flatten(fill(SHAPES, mixed.items(), None, "here"))
    assert kept["a.weight"].dtype == np.float16 and kept["layers.0.bias"].dtype == np.float32
    cast = flatten(fill(SHAPES, mixed.items(), "bfloat16", "here"))
    assert {str(array.dtype) for array in cast.values()} == {"bfloat16"}


def test_rotary_buffers_and_ignored_names_are_passed_over() -> None:
    extra = tensors(**{"x.rotary_emb.inv_freq": np.zeros(4), "lm_head.weight": np.zeros(1)})
    assert flatten(fill(SHAPES, extra.items(), None, "here", ("lm_head.weight",))).keys() == SHAPES.keys()
    with pytest.raises(UserError, match=r"not used: lm_head\.weight"):
        fill(SHAPES, extra.items(), None, "here")


def test_a_tensor_that_comes_under_two_names_is_refused() -> None:
    twice = [*tensors().items(), ("layers.0.bias", np.zeros(2, np.float32))]
    with pytest.raises(UserError, match=r"layers\.0\.bias comes twice, under two names / here"):
        fill(SHAPES, twice, None, "here")
    row = np.zeros(3, np.float32)
    whole = ("a", np.zeros((2, 3), np.float32))
    for stacked in ([("a", row, 0), ("a", row, 1), ("a", row, 1)], [whole, ("a", row, 1)]):
        with pytest.raises(UserError, match=r"a\[1\] comes twice"):
            fill({"a": (2, 3)}, stacked, None, "here")


def test_insert_makes_nested_dictionaries() -> None:
    tree: dict = {}
    insert(tree, "model.layers.10.weight", 1)
    insert(tree, "model.layers.2.weight", 2)
    assert tree == {"model": {"layers": {10: {"weight": 1}, 2: {"weight": 2}}}}


def test_long_lists_are_shortened() -> None:
    assert shorten(["a", "b"]) == "a, b"
    assert shorten([str(i) for i in range(11)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def test_all_safetensors_files_of_a_folder_without_index(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1)}, tmp_path / "two.safetensors")
    save_file({"b": np.ones(1)}, tmp_path / "one.safetensors")
    assert [name for name, _ in read_tensors(safetensors_files(tmp_path))] == ["b", "a"]


def test_a_tensor_that_lies_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": np.zeros((2, 3), np.float32)}, tmp_path / "one.safetensors")
    save_file(tensors(), tmp_path / "two.safetensors")
    with pytest.raises(UserError, match=r"a\.weight lies in two files / .*one\.safetensors, .*two\.safetensors"):
        dict(read_tensors(safetensors_files(tmp_path)))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000])
def test_json_that_is_no_text_or_nested_without_end_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_files_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="no weight_map of tensors to files"):
        safetensors_files(tmp_path)

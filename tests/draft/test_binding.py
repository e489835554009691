"""Which drafts a target takes: shapes, taps, tokenizer, fingerprints, and drafts that store no embedding."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax.draft.draft import binding_warning
from tests.tiny import SCATTERED, ids_of, random_draft, write_target


def other(tmp_path: Path, **changes) -> e3.Target:
    return e3.load_target(write_target(tmp_path / "other", **changes), dtype="float32")


def without_facts(draft: e3.Draft) -> e3.Draft:
    return dataclasses.replace(draft, facts={})


def test_the_right_target_is_taken_without_a_word(tiny_target, tiny_draft) -> None:
    assert tiny_draft.bind(tiny_target) is tiny_draft
    assert binding_warning(tiny_draft, tiny_target) is None
    for facts in ({"target": None, "verifier": None}, {"target": {"fingerprint": None}}):  # as JSON may say it
        draft = dataclasses.replace(tiny_draft, facts=facts)
        assert draft.bind(tiny_target) is draft and "has no fingerprint" in binding_warning(draft, tiny_target)


@pytest.mark.parametrize("facts", [True, False], ids=["with fingerprint", "without fingerprint"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size 64 against 128"),
        ({"vocab_size": 500}, "vocab_size 512 against 500"),
    ],
)
def test_another_shape_is_refused(tmp_path, tiny_draft, changes: dict, message: str, facts: bool) -> None:
    draft = tiny_draft if facts else without_facts(tiny_draft)
    with pytest.raises(e3.UserError, match=rf"belongs to another target: {message} /") as caught:
        draft.bind(other(tmp_path, num_hidden_layers=8, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_hidden_layers": 9}, "num_layers 8 against 9"), ({"num_attention_heads": 2}, "num_heads 4 against 2")],
)
def test_another_fingerprint_fact_is_refused(tmp_path, tiny_draft, changes: dict, message: str) -> None:
    target = other(tmp_path, **changes)
    with pytest.raises(e3.UserError, match=message):
        tiny_draft.bind(target)
    assert without_facts(tiny_draft).bind(target) is not None  # nothing known, nothing contradicted


def test_a_tap_that_the_target_lacks_is_refused(tmp_path, tiny_draft) -> None:
    with pytest.raises(e3.WiringError, match="tap 6 does not exist"):
        tiny_draft.bind(other(tmp_path, num_hidden_layers=4))


def test_other_weights_of_the_same_shape_are_a_warning(tmp_path, tiny_draft, tiny_target) -> None:
    target = other(tmp_path, seed=9)
    tiny_draft.bind(target)
    warning = binding_warning(tiny_draft, target)
    assert "was trained on other weights" in warning and "\n" not in warning
    assert "has no fingerprint" in binding_warning(without_facts(tiny_draft), tiny_target)


def test_another_precision_is_no_warning(tiny_folder, tiny_draft) -> None:
    assert binding_warning(tiny_draft, e3.load_target(tiny_folder, dtype="bfloat16")) is None


class Tokenizer:
    def __init__(self, *words: str):
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def test_another_tokenizer_is_refused(tiny_target, tiny_draft) -> None:
    target = dataclasses.replace(tiny_target, tokenizer=Tokenizer("a", "b"))
    facts = {"target": {"tokenizer_fingerprint": target.tokenizer_fingerprint}}
    draft = dataclasses.replace(tiny_draft, facts=facts)
    assert draft.bind(target) is draft
    assert draft.bind(tiny_target) is draft  # a target without tokenizer says nothing
    with pytest.raises(e3.UserError, match="trained with another tokenizer"):
        draft.bind(dataclasses.replace(tiny_target, tokenizer=Tokenizer("b", "a")))


def without_embedding(draft: e3.Draft, folder: Path) -> Path:
    e3.save_draft(draft, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_draft_without_embedding_takes_the_targets(tmp_path: Path, tiny_target, tiny_draft) -> None:
    folder = without_embedding(tiny_draft, tmp_path / "draft")
    draft = e3.load_draft(folder)
    features = tiny_target.forward(ids_of(0, 1, 6), taps=draft.taps).taps
    with pytest.raises(e3.UserError, match=r"stores no embedding / draft = draft\.bind\(target\) lends it"):
        draft.ttt_forward(features, ids_of(0, 1, 6), 1)
    bound = draft.bind(tiny_target)
    embedding = tiny_target.params["model"]["embed_tokens"]["weight"]
    np.testing.assert_array_equal(bound.params["embed_tokens"]["weight"], embedding)
    assert not draft.is_bound and bound.is_bound and e3.load_draft(folder, target=tiny_target).is_bound
    reference = tiny_draft.with_params({**tiny_draft.params, "embed_tokens": {"weight": embedding}})
    for a, b in zip(
        bound.ttt_forward(features, ids_of(0, 1, 6), 1),
        reference.ttt_forward(features, ids_of(0, 1, 6), 1),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_a_draft_keeps_its_own_embedding(tiny_target, tiny_draft) -> None:
    own = tiny_draft.bind(tiny_target).params["embed_tokens"]["weight"]
    assert not np.array_equal(own, tiny_target.params["model"]["embed_tokens"]["weight"])


def test_an_embedding_of_another_width_fits_no_draft(tiny_target) -> None:
    draft = random_draft(tiny_target, d2t=SCATTERED)
    decoder = dataclasses.replace(draft.config.decoder, hidden_size=32)
    params = {name: value for name, value in draft.params.items() if name != "embed_tokens"}
    narrow = dataclasses.replace(draft, config=dataclasses.replace(draft.config, decoder=decoder), params=params)
    with pytest.raises(e3.UserError, match="hidden size differs from the target's"):
        narrow.bind(tiny_target)

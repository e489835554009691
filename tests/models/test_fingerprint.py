"""Fingerprints tell copies, other weights and other shapes apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.models.fingerprint import differing_facts, same_weights, target_fingerprint, tokenizer_fingerprint
from tests.tiny import write_target


def test_precision_changes_the_hash_but_not_the_model(tiny_folder, tiny_target) -> None:
    full, half = tiny_target.fingerprint, e3.load_target(tiny_folder, dtype="bfloat16").fingerprint
    assert full["hash"] != half["hash"] and (full["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert same_weights(full, half) and not differing_facts(full, half)
    assert full == e3.load_target(tiny_folder, dtype="float32").fingerprint


def test_other_weights_are_another_model(tmp_path, tiny_target) -> None:
    other = e3.load_target(write_target(tmp_path / "other", seed=9), dtype="float32").fingerprint
    assert not same_weights(other, tiny_target.fingerprint) and not differing_facts(other, tiny_target.fingerprint)


@pytest.mark.parametrize(("noise", "same"), [(0.05, True), (0.5, False)])
def test_rough_copies_are_the_same_model_and_rougher_ones_not(tiny_target, noise: float, same: bool) -> None:
    rng = np.random.default_rng(0)
    rough = jax.tree.map(lambda a: np.asarray(a) * (1 + noise * rng.standard_normal(a.shape)), tiny_target.params)
    assert same_weights(target_fingerprint(tiny_target.config, rough), tiny_target.fingerprint) == same


def test_every_region_of_the_weights_is_sampled(tiny_target) -> None:
    for part in ("model", "lm_head"):
        other = dict(tiny_target.params)
        other[part] = jax.tree.map(jnp.negative, other[part])
        assert target_fingerprint(tiny_target.config, other)["hash"] != tiny_target.fingerprint["hash"]


def test_differing_facts_are_words(tiny_target) -> None:
    a = tiny_target.fingerprint
    assert differing_facts(a, a | {"vocab_size": 500, "num_layers": 7}) == [
        "num_layers 8 against 7",
        "vocab_size 512 against 500",
    ]
    assert differing_facts({}, a) == []


class Vocabulary:
    def __init__(self, words: dict[str, int]):
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return self.words


def test_tokenizers_are_told_apart_by_words_and_ids() -> None:
    one = tokenizer_fingerprint(Vocabulary({"a": 0, "b": 1}))
    assert one == tokenizer_fingerprint(Vocabulary({"b": 1, "a": 0}))
    assert one != tokenizer_fingerprint(Vocabulary({"a": 1, "b": 0}))
    assert one != tokenizer_fingerprint(Vocabulary({"a": 0, "ä": 1}))
    assert tokenizer_fingerprint(None) is None

"""`measure`: what is timed is compiled before, and only full groups count."""

import pytest

from eagle3_jax import UserError
from eagle3_jax.bench.measure import measure
from eagle3_jax.speculate import round as rounds
from tests.tiny import bigram_draft, bigram_target, ids_of

SHORT, LONG = ids_of(1, 5, vocab_size=8).tolist(), ids_of(2, 30, vocab_size=8).tolist()  # both padded to 32


@pytest.fixture(scope="module")
def pair():
    target = bigram_target(max_position_embeddings=512)
    return target, bigram_draft(target)


def compiled() -> int:
    return rounds.prefill._cache_size() + rounds.speculate._cache_size()


def test_nothing_is_compiled_while_it_is_timed(pair) -> None:
    """Also where prompts of one padded length need caches of two lengths: 5 + 100 tokens and 30 + 100."""
    sizes = []
    prompts = [SHORT, LONG, SHORT]
    tallies = measure(*pair, prompts, ["plain", "chain:2"], 100, done=lambda *_: sizes.append(compiled()))
    assert sizes == [sizes[0]] * 3 and tallies["plain"].tokens == 300


def test_without_a_full_group_there_is_nothing_to_measure(pair) -> None:
    with pytest.raises(UserError, match="a batch of 3 needs as many prompts, there are 2"):
        measure(*pair, [SHORT, LONG], ["plain"], 4, batch=3)

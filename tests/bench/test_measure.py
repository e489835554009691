"""`measure`: what is timed is compiled before, and only full groups count."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from eagle3_jax import UserError
from eagle3_jax.bench.measure import Tally, identical_share, measure, parting_gaps
from eagle3_jax.speculate import round as rounds
from eagle3_jax.speculate.generate import Result
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


def test_where_texts_part_the_gap_of_the_two_likeliest_tokens_is_told(pair) -> None:
    target, _ = pair
    plain, other = Tally([Result([3, 1, 4]), Result([5, 6, 7])]), Tally([Result([3, 2, 4]), Result([5, 6, 7])])
    logits = np.sort(np.asarray(target.forward([[*SHORT, 3]]).logits[0, -1]))
    assert parting_gaps(target, [SHORT, LONG], other, plain) == [round(float(logits[-1] - logits[-2]), 4)]
    assert identical_share(other, plain) == 0.5


def test_in_bfloat16_texts_part_only_at_near_ties(pair) -> None:
    target, draft = (replace(x, params=jax.tree.map(lambda a: a.astype("bfloat16"), x.params)) for x in pair)
    prompts = [[first, 1, 2] for first in range(8)]
    tallies = measure(target, draft, prompts, ["plain", "chain:2"], 40, batch=8)
    gaps = parting_gaps(target, prompts, tallies["chain:2"], tallies["plain"])
    assert len(gaps) == 8 * (1 - identical_share(tallies["chain:2"], tallies["plain"]))
    assert all(gap < 0.1 for gap in gaps)

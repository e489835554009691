"""Speculation leaves the target's distribution as it is: vocabulary of 8, 100,000 requests, the exact answer known.

The first three tokens of all requests are compared with the distribution enumerated from plain forwards, position by
position and jointly, for chains and trees, drafts as point masses and as samples, good and bad ones.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import eagle3_jax as e3
from eagle3_jax.speculate.generate import pair
from eagle3_jax.speculate.request import device_sampling
from eagle3_jax.speculate.round import prefill, speculate
from eagle3_jax.speculate.strategy import parse_strategy, with_sampled_drafts
from tests.tiny import bigram_draft, bigram_target

SAMPLES, VOCAB, NEW = 100_000, 8, 3
PROMPT = [5, 2, 6]
SETTINGS = [(1.0, 1.0), (0.7, 0.9)]
KNOWN = [7, 0, 1, 3, 4, 6]  # the draft's vocabulary, not in order: tokens 2 and 5 can never be drafted


@pytest.fixture(scope="module")
def target() -> e3.Target:
    return bigram_target(VOCAB, context=1.0)


@pytest.fixture(scope="module")
def exact(target):
    """(temperature, top_p) -> probability of each of the first three tokens together, [8, 8, 8]."""
    texts = [PROMPT + list(rest) for rest in itertools.product(range(VOCAB), repeat=NEW - 1)]
    logits = np.asarray(target.forward(np.asarray(texts)).logits, np.float64)[:, len(PROMPT) - 1 :]

    def joint(temperature: float, top_p: float) -> np.ndarray:
        p = np.exp(logits / temperature)
        p /= p.sum(-1, keepdims=True)
        order = np.argsort(-p, axis=-1)
        before = np.cumsum(np.take_along_axis(p, order, -1), axis=-1) - np.take_along_axis(p, order, -1)
        np.put_along_axis(p, order, np.where(before < top_p, np.take_along_axis(p, order, -1), 0), -1)
        p = (p / p.sum(-1, keepdims=True)).reshape(VOCAB, VOCAB, NEW, VOCAB)
        return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]

    return joint


@pytest.fixture(scope="module")
def sample(target):
    """(strategy, draft, temperature, top_p) -> the first three tokens of all requests, [SAMPLES, 3], and mean tau."""
    prompts = [PROMPT] * SAMPLES
    ids, lengths = jnp.asarray(prompts, jnp.int32), jnp.full(SAMPLES, len(PROMPT))
    template = device_sampling(target, prompts, [e3.SamplingParams(temperature=0.7, top_p=0.9, seed=1)] * SAMPLES)
    keys = jax.random.split(jax.random.key(3), SAMPLES)

    def run(strategy, draft: e3.Draft, temperature: float, top_p: float) -> tuple[np.ndarray, float]:
        changes = {"key": keys, "temperature": jnp.full(SAMPLES, temperature), "top_p": jnp.full(SAMPLES, top_p)}
        sampling = template._replace(random=template.random._replace(**changes))
        models, weights = pair(target, draft)
        state, first = prefill(models, 16, strategy, weights, ids, lengths, sampling)
        out = np.full((SAMPLES, NEW + strategy.depth + 1), -1)
        out[:, 0], count, accepted = first, np.ones(SAMPLES, int), []
        while count.min() < NEW:
            state, committed = speculate(models, strategy, weights, state)
            new, taken = np.asarray(committed.tokens), np.asarray(committed.accepted)
            accepted.append(taken[count < NEW].mean())
            for i in range(strategy.depth + 1):
                rows = np.flatnonzero((taken >= i) & (count + i < NEW))
                out[rows, count[rows] + i] = new[rows, i]
            count = np.minimum(count + taken + 1, NEW)
        return out[:, :NEW], accepted[0]

    return run


def assert_follows(tokens: np.ndarray, wanted: np.ndarray) -> None:
    """Total variation under 0.01 and a chi-square test at each position, and a chi-square test of all three at once."""
    cells = np.ravel_multi_index(tokens.T, wanted.shape)
    counts = np.bincount(cells, minlength=wanted.size).reshape(wanted.shape)
    for position in range(NEW):
        others = tuple(i for i in range(NEW) if i != position)
        seen, p = counts.sum(others), wanted.sum(others)
        assert 0.5 * np.abs(seen / len(tokens) - p).sum() < 0.01, position
        assert chi_square(seen, p) > 1e-4, position
    assert chi_square(counts.ravel(), wanted.ravel()) > 1e-4


def chi_square(seen: np.ndarray, p: np.ndarray) -> float:
    """p-value; cells expected fewer than five times are joined."""
    assert (seen[p == 0] == 0).all()
    expected = p * seen.sum()
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    filled = expected > 0
    return stats.chisquare(seen[filled], expected[filled]).pvalue


DRAFTS = {"good": 0.05, "fair": 0.5, "bad": 3.0}
STRATEGIES = ["chain:2", "tree:2x3x7", [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)]]


@pytest.mark.parametrize("sampled", [False, True], ids=["point masses", "sampled drafts"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["chain", "tree", "static tree"])
def test_the_distribution_is_the_targets(target, exact, sample, strategy, sampled: bool) -> None:
    shape = parse_strategy(strategy)
    shape = with_sampled_drafts(shape) if sampled else shape
    rates = {}
    for name, noise in DRAFTS.items():
        draft = bigram_draft(target, noise, KNOWN)
        for setting in SETTINGS if name != "good" else SETTINGS[:1]:
            tokens, rates[name, setting] = sample(shape, draft, *setting)
            assert_follows(tokens, exact(*setting))
    assert rates["good", SETTINGS[0]] > rates["bad", SETTINGS[0]] > 0  # or nothing was put to the test

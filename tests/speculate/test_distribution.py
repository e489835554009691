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
from tests.tiny import bigram_draft, bigram_target, not_a_number

# Running takes longer than compiling here, and the other way round everywhere else (conftest.py).
OPTIMISED = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": False}
SAMPLES, VOCAB, NEW = 100_000, 8, 3
PROMPT = [5, 2, 6]
KNOWN = [7, 0, 1, 3, 4, 6]  # the draft's vocabulary, not in order: tokens 2 and 5 can never be drafted


@pytest.fixture(scope="module")
def target() -> e3.Target:
    return bigram_target(VOCAB, context=0.3, hidden_size=8, head_dim=8, intermediate_size=8)


@pytest.fixture(scope="module")
def exact(target):
    """(temperature, top_p) -> probability of each of the three tokens after PROMPT together, [8, 8, 8]."""
    texts = [PROMPT + list(rest) for rest in itertools.product(range(VOCAB), repeat=NEW - 1)]
    logits = np.asarray(target.forward(np.asarray(texts)).logits, np.float64)[:, len(PROMPT) - 1 :]

    def joint(temperature: float, top_p: float) -> np.ndarray:
        p = np.exp(logits / temperature)
        p /= p.sum(-1, keepdims=True)
        order = np.argsort(-p, axis=-1)
        falling = np.take_along_axis(p, order, -1)
        np.put_along_axis(p, order, np.where(np.cumsum(falling, axis=-1) - falling < top_p, falling, 0), -1)
        p = (p / p.sum(-1, keepdims=True)).reshape(VOCAB, VOCAB, NEW, VOCAB)
        return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]

    return joint


@pytest.fixture(scope="module")
def sample(target):
    """(strategy, draft, temperature, top_p) -> three tokens of each request, [SAMPLES, 3], and accepted drafts a round.

    The last token of the prompt is the pending one of the first round, so that rounds alone choose the tokens.
    """
    one = device_sampling(target, [PROMPT], [e3.SamplingParams(temperature=0.7, top_p=0.9, seed=1)])
    certain = device_sampling(target, [PROMPT], [e3.SamplingParams(logit_bias={PROMPT[-1]: 100.0})])

    programs = {}

    def run(strategy, draft: e3.Draft, temperature: float, top_p: float) -> tuple[np.ndarray, float]:
        models, weights = pair(target, draft)
        state, first = prefill(models, 10, weights, jnp.asarray([PROMPT[:-1]]), jnp.asarray([2]), certain)
        assert first == PROMPT[-1]
        nothing = state.draft.features.map(lambda a: a[:, :0]), state.draft.next_ids[:, :0]
        state = state._replace(draft=state.draft._replace(features=nothing[0], next_ids=nothing[1]), sampling=one)
        state = jax.tree.map(lambda x: jnp.broadcast_to(x, (SAMPLES, *x.shape[1:])), state)
        changes = {"temperature": jnp.full(SAMPLES, temperature), "top_p": jnp.full(SAMPLES, top_p)}
        random = state.sampling.random._replace(key=jax.random.split(jax.random.key(3), SAMPLES), **changes)
        state = state._replace(sampling=state.sampling._replace(random=random))
        if strategy not in programs:
            programs[strategy] = speculate.lower(models, strategy, weights, state).compile(OPTIMISED)
        out, count, rates = np.full((SAMPLES, NEW), -1), np.zeros(SAMPLES, int), []
        while count.min() < NEW:
            state, committed = programs[strategy](weights, state)
            new, accepted = np.asarray(committed.tokens), np.asarray(committed.accepted)
            rates.append(accepted.mean())
            for i in range(new.shape[1]):
                rows = np.flatnonzero((accepted >= i) & (count + i < NEW))
                out[rows, count[rows] + i] = new[rows, i]
            count += accepted + 1
        return out, rates[0]

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


RUNS = [(0.05, 1.0, 1.0), (3.0, 0.7, 0.9)]  # noise of the draft (it is good, it is bad), temperature, top_p


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True], ids=["point masses", "sampled drafts"])
@pytest.mark.parametrize("strategy", ["chain:2", "tree:2x2x5"])
def test_the_distribution_is_the_targets(target, exact, sample, strategy: str, sampled: bool) -> None:
    shape = parse_strategy(strategy)
    shape = with_sampled_drafts(shape) if sampled else shape
    rates = []
    for noise, *setting in RUNS:
        tokens, rate = sample(shape, bigram_draft(target, noise, KNOWN), *setting)
        assert_follows(tokens, exact(*setting))
        rates.append(rate)
    assert min(rates) > 0 and rates[0] != rates[1]  # or nothing was put to the test


STRATEGIES = ["chain:2", "tree:2x2x5", [(0,), (1,), (1, 0), (1, 1)]]


@pytest.mark.slow
@pytest.mark.parametrize("setting", [(1.0, 1.0), (0.7, 0.9)], ids=str)
@pytest.mark.parametrize("sampled", [False, True], ids=["point masses", "sampled drafts"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_at_each_setting_with_drafts_of_every_quality(target, exact, sample, strategy, sampled: bool, setting) -> None:
    """Good, fair, bad, and not even finite; everything crossed with everything."""
    shape = parse_strategy(strategy)
    shape = with_sampled_drafts(shape) if sampled else shape
    good, fair, bad = (bigram_draft(target, noise, KNOWN) for noise in (0.05, 0.5, 3.0))
    rates = []
    for draft in (good, fair, bad, not_a_number(good)):
        tokens, rate = sample(shape, draft, *setting)
        assert_follows(tokens, exact(*setting))
        rates.append(rate)
    assert min(rates[:3]) > 0 and rates[0] > rates[2]

"""Draft trees against brute force: which nodes, what each sees, and what is in the caches after a round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.models.attention import causal, empty_cache
from eagle3_jax.speculate.drafting import DraftState, draft_tree, extend
from eagle3_jax.speculate.generate import pad_prompts, pair
from eagle3_jax.speculate.round import prefill, speculate
from eagle3_jax.speculate.strategy import Strategy, parse_strategy
from eagle3_jax.speculate.tree import Candidates, build_tree
from tests.tiny import bigram_draft, bigram_target, ids_of, relative

# --- the choice of nodes, on candidates made up


def made_up(strategy: Strategy, rng: np.random.Generator, ties: bool) -> Candidates:
    """Candidates of a dynamic tree with the given gains; with ties many of them are 0 (probability one)."""
    k, beams, parents, scores = strategy.top_k, np.full((1,), -1), [], []
    above, offset, chosen = np.zeros(1), 0, []
    for level in range(strategy.depth):
        gains = -rng.integers(0, 2, (len(beams), k)) if ties else -rng.random((len(beams), k))
        gains = -np.sort(-gains, axis=1)
        parents.append(np.repeat(beams, k))
        scores.append((above[:, None] + gains).ravel())
        if level < strategy.depth - 1:
            best = np.argsort(-scores[-1], kind="stable")[:k]
            beams, above, offset = offset + best, scores[-1][best], offset + len(scores[-1])
            chosen.append(beams)
    flat = [np.concatenate(x)[None] for x in (parents, scores, [*chosen, np.zeros(0, int)])]
    tokens = rng.integers(0, 9, flat[0].shape)
    to_ids = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    return Candidates(
        to_ids(tokens), to_ids(flat[0]), jnp.asarray(flat[1], jnp.float32), to_ids(flat[2]), None, jnp.ones(1, bool)
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", ["tree:3x3x8", "tree:4x2x9", "tree:2x5x20"])
def test_nodes_are_the_best_candidates_and_see_their_ancestors(name: str, ties: bool) -> None:
    strategy, rng = parse_strategy(name), np.random.default_rng(0)
    build = jax.jit(lambda pending, candidates: build_tree(strategy, pending, candidates))
    for _ in range(20):
        candidates = made_up(strategy, rng, ties)
        tree = jax.tree.map(lambda x: np.asarray(x[0]), build(jnp.asarray([7]), candidates))
        parents, scores = np.asarray(candidates.parents[0]), np.asarray(candidates.scores[0])
        best = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: strategy.nodes - 1])
        assert tree.tokens.tolist() == [7, *np.asarray(candidates.tokens[0])[best]]
        for node, candidate in enumerate(best, start=1):
            ancestors, up = {node, 0}, candidate
            while (up := parents[up]) >= 0:
                assert up in best  # a kept node's ancestors are kept, under ties too
                ancestors.add(1 + best.index(up))
            assert set(np.flatnonzero(tree.sees[node])) == ancestors
            assert tree.parents[node] < node and tree.depth[node] == len(ancestors) - 1
            beams = np.asarray(candidates.beams[0]).tolist()
            assert tree.source[node] == (1 + beams.index(candidate) if candidate in beams else 0)
        assert tree.sees[0].tolist() == [True] + [False] * (strategy.nodes - 1)


# --- the drafted tree against a draft without a cache

PROMPTS = [ids_of(i, 9) for i in (1, 2)]


@pytest.fixture(scope="module")
def known(shallow_target, shallow_draft):
    """The draft's state before its first round, nothing cached: all slots of two prompts are new."""
    first = np.argmax(np.asarray(shallow_target.forward(np.stack(PROMPTS)).logits[:, -1]), axis=-1)
    ids = np.concatenate([np.stack(PROMPTS), first[:, None]], axis=1)
    taps = shallow_target.forward(np.stack(PROMPTS), taps=shallow_draft.taps).taps
    shape = shallow_draft.config.decoder
    cache = empty_cache(shape.num_layers, 2, shape.num_kv_heads, 32, shape.head_dim, jnp.float32)
    hidden = jnp.zeros((2, 1, shape.hidden_size))
    return DraftState(cache, hidden, taps, jnp.asarray(ids[:, 1:], jnp.int32), jnp.full(2, len(PROMPTS[0])))


@pytest.fixture(scope="module")
def log_probabilities(shallow_draft, known):
    """(prompt, drafted draft ids) -> the draft's log probabilities of what follows, everything recomputed."""
    model, size, length = shallow_draft.graph.merge(shallow_draft.params), len(PROMPTS[0]), len(PROMPTS[0]) + 3
    positions = jnp.arange(length)[None]

    @jax.jit
    def run(hidden, ids, at):
        model = shallow_draft.graph.merge(shallow_draft.params)
        attend = causal(jnp.zeros((1, length), jnp.int32))
        y, _ = model(hidden, ids, positions, attend, ((),) * len(model.layers))
        return model.feedback(y)[0, at], jax.nn.log_softmax(model.logits(y)[0, at])

    features = model.project(known.features)
    memory: dict = {}

    def after(row: int, path: tuple[int, ...]):
        if (row, path) not in memory:
            fed = [after(row, path[:i])[0] for i in range(len(path))]
            hidden = jnp.concatenate([features[row], *(h[None] for h in fed)])
            ids = jnp.concatenate([known.next_ids[row], jnp.asarray(shallow_draft.d2t[list(path)], jnp.int32)])
            pad = length - len(ids)
            ids, hidden = jnp.pad(ids, (0, pad)), jnp.pad(hidden, ((0, pad), (0, 0)))
            memory[row, path] = run(hidden[None], ids[None], size + len(path) - 1)
        return memory[row, path]

    return lambda row, path: np.asarray(after(row, path)[1])


def best_first(scored: dict, count: int) -> list:
    return sorted(scored, key=lambda path: -scored[path])[:count]


def paths_of(tree, row: int, d2t: np.ndarray) -> set[tuple[int, ...]]:
    """Draft ids from the root to each node."""
    to_draft = {int(t): i for i, t in enumerate(d2t)}
    paths = [()]
    for node in range(1, tree.tokens.shape[1]):
        paths.append((*paths[int(tree.parents[row, node])], to_draft[int(tree.tokens[row, node])]))
    return set(paths[1:])


def drafted(draft: e3.Draft, known: DraftState, strategy: Strategy):
    @jax.jit
    def run(params, known):
        model, length = draft.graph.merge(params), known.count
        hidden, cache = extend(model, known.cache, known.features, known.next_ids, jnp.zeros_like(length), length)
        known = known._replace(cache=cache, hidden=hidden)
        _, candidates = draft_tree(model, jnp.asarray(draft.d2t), strategy, known, length, None)
        return build_tree(strategy, jnp.zeros(2, jnp.int32), candidates), candidates

    return run(draft.params, known)


def test_a_dynamic_tree_is_that_of_eagle_2(shallow_draft, known, log_probabilities) -> None:
    strategy = parse_strategy("tree:3x3x12")
    tree, _ = drafted(shallow_draft, known, strategy)
    for row in range(2):
        beams, every = {(): 0.0}, {}
        for _ in range(strategy.depth):
            level = {}
            for path, score in beams.items():
                gains = log_probabilities(row, path)
                level |= {(*path, int(i)): score + float(gains[i]) for i in np.argsort(-gains)[:3]}
            every |= level
            beams = {path: level[path] for path in best_first(level, 3)}
        assert paths_of(tree, row, shallow_draft.d2t) == set(best_first(every, strategy.nodes - 1))


def test_a_static_tree_follows_its_ranks(shallow_draft, known, log_probabilities) -> None:
    paths = [(0,), (2,), (0, 1), (2, 0), (2, 1), (2, 1, 0)]
    tree, _ = drafted(shallow_draft, known, parse_strategy(paths))
    for row in range(2):
        expected = set()
        for ranks in paths:
            path = ()
            for rank in ranks:
                path = (*path, int(np.argsort(-log_probabilities(row, path))[rank]))
            expected.add(path)
        assert paths_of(tree, row, shallow_draft.d2t) == expected


# --- the caches after rounds

STRATEGIES = ["chain:3", "tree:3x3x9", [(0,), (1,), (1, 0), (0, 1), (1, 0, 1), (0, 1, 0)]]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_after_rounds_both_caches_are_those_of_a_prefill_of_the_text(strategy) -> None:
    """Also what acceptance rests on: draft entries made from its own guesses are replaced by true features."""
    target = bigram_target(64, context=1.0, num_hidden_layers=2)
    draft, shape = bigram_draft(target, 0.3), parse_strategy(strategy)
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 4], [60, 1, 2, 3]]
    models, weights = pair(target, draft)
    state, first = prefill(models, 64, weights, *pad_prompts(prompts), None)
    texts, accepted = [[*p, int(t)] for p, t in zip(prompts, first, strict=True)], []
    for _ in range(6):
        state, committed = speculate(models, shape, weights, state)
        for text, new, count in zip(texts, *map(np.asarray, committed[:2]), strict=True):
            text += new[: count + 1].tolist()
            accepted.append(count)
    assert len(set(map(int, accepted))) > 1  # rounds of several kinds
    assert state.length.tolist() == [len(text) - 1 for text in texts]
    fresh, _ = prefill(models, 64, weights, *pad_prompts([text[:-1] for text in texts]), None)
    assert relative(state.draft.hidden, fresh.draft.hidden) < 1e-5
    for row, end in enumerate(state.length.tolist()):
        both, fresh_both = (state.cache, state.draft.cache), (fresh.cache, fresh.draft.cache)
        for got, expected in zip(jax.tree.leaves(both), jax.tree.leaves(fresh_both), strict=True):
            assert relative(got[row, :, :end], expected[row, :, :end]) < 1e-5

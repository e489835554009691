"""Chain speculation against a cache-free reference round by round, and training against serving.

The reference (golden chain/*) recomputes everything from true target features in each round. Parity: what the training
graph predicts is what the server proposes, at every round and depth.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import eagle3_jax as e3
from eagle3_jax.models.attention import causal, empty_cache
from eagle3_jax.speculate.drafting import extend
from eagle3_jax.speculate.generate import cache_entries, pad_prompts, pair
from eagle3_jax.speculate.round import catch_up, next_round, prefill
from eagle3_jax.speculate.strategy import PLAIN, parse_strategy
from tests.tiny import ids_of, random_draft, relative

CASES = ["base", "headdim", "nbr", "normout", "qwen3draft"]
DEPTH, NEW = 5, 32


class Case(NamedTuple):
    target: e3.Target
    draft: e3.Draft
    prompts: list[list[int]]
    answers: list[e3.Result]
    expected: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def results(golden: Callable[[str], Path], golden_pair) -> Callable[[str], Case]:
    """Each golden case generated once, its prompts as one batch."""
    done: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in done:
            folder = golden(f"chain/{name}")
            facts = json.loads((folder / "rounds.json").read_text())
            assert (facts["target"], facts["K"], facts["new_tokens"]) == ("targets/llama_gqa", DEPTH, NEW)
            expected = load_file(folder / "expected.safetensors")
            target, draft = golden_pair[0], e3.load_draft(golden(facts["draft"]))
            prompts = expected["prompts"].tolist()
            answers = e3.generate(
                target, draft, prompts, max_new_tokens=NEW, strategy=f"chain:{DEPTH}", stop_token_ids=()
            )
            done[name] = Case(target, draft, prompts, answers, expected)
        return done[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_reference(results, name: str) -> None:
    case = results(name)
    for i, answer in enumerate(case.answers):
        for kind in ("tokens", "accepted", "drafts"):
            assert getattr(answer, kind) == case.expected[f"{i}.spec.{kind}"].tolist(), (i, kind)
        assert answer.finish_reason == "length"
        assert answer.tau == 1 + np.mean(answer.accepted)
    assert max(max(answer.accepted) for answer in case.answers) > 0  # or deep rounds were never tried


@pytest.mark.parametrize("name", CASES)
def test_the_draft_reads_the_features_of_the_reference(results, name: str) -> None:
    case = results(name)
    taps = case.target.forward(np.asarray(case.prompts), taps=case.draft.taps).taps
    fused = e3.fuse(taps, case.draft.taps)
    for i in range(len(case.prompts)):
        assert relative(fused[i], case.expected[f"{i}.features"]) < 1e-4


def round_starts(answer: e3.Result) -> list[int]:
    """Tokens committed before each round, the first one from prefill included."""
    return np.cumsum([1, *(a + 1 for a in answer.accepted[:-1])]).tolist()


def compare_with_training(target: e3.Target, draft: e3.Draft, prompts, answers, depth: int) -> int:
    """Asserts parity on whole answers fed to the training graph; returns how many draft tokens were compared.

    A round with g tokens committed drafts from slot P-2+g, the last token with features. The graph is teacher-forced,
    so depth d can be compared while the drafts before it were right: the first wrong one included.
    """
    texts = np.asarray([p + a.tokens for p, a in zip(prompts, answers, strict=True)])
    features = target.forward(texts, taps=draft.taps).taps
    steps = [np.asarray(jnp.argmax(x, axis=-1)) for x in draft.ttt_forward(features, texts, depth)]
    compared = 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for start, accepted, drafts in zip(round_starts(answer), answer.accepted, answer.drafts, strict=True):
            slot = len(prompt) - 2 + start
            for d in range(min(accepted + 1, depth, texts.shape[1] - 1 - slot)):
                assert int(draft.d2t[steps[d][i, slot]]) == drafts[d], (i, start, d)
                compared += 1
    return compared


@pytest.mark.parametrize("name", CASES)
def test_training_predicts_what_serving_proposes(results, name: str) -> None:
    case = results(name)
    rounds = sum(len(answer.accepted) for answer in case.answers)
    assert compare_with_training(case.target, case.draft, case.prompts, case.answers, DEPTH) > rounds


def compare_first_round(target: e3.Target, draft: e3.Draft, prompts, answers, depth: int, length: int) -> None:
    """Fed with the draft's own tokens, the training graph must agree beyond the first wrong one too.

    length: to which texts are padded, that of a program already compiled.
    """
    texts = [p + a.tokens[:1] + a.drafts[0] for p, a in zip(prompts, answers, strict=True)]
    texts = np.pad(texts, ((0, 0), (0, length - len(texts[0]))))
    features = target.forward(texts, taps=draft.taps).taps
    steps = draft.ttt_forward(features, texts, depth)
    for i, answer in enumerate(answers):
        slot = len(prompts[i]) - 1
        assert [int(draft.d2t[int(jnp.argmax(logits[i, slot]))]) for logits in steps] == answer.drafts[0]


def test_training_predicts_what_an_untrained_draft_proposes(shallow_target) -> None:
    # A window shorter than the texts: training anchors it at the last token with target features, so must serving.
    window = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]}
    flags = {"norm_before_fc": True, "norm_output": True}
    draft = random_draft(shallow_target, taps=(2, 0, 1), layers=2, layer=window, **flags)
    prompts = [[5 + i, 6, 7 * i, 8] for i in range(8)]
    answers = e3.generate(shallow_target, draft, prompts, max_new_tokens=12, strategy="chain:3", stop_token_ids=())
    assert compare_with_training(shallow_target, draft, prompts, answers, 3) >= sum(len(a.accepted) for a in answers)
    compare_first_round(shallow_target, draft, prompts, answers, 3, len(prompts[0]) + 12)


@pytest.mark.parametrize("batch", [1, 3])
def test_many_slots_read_at_once_are_the_same_read_by_few(shallow_target, batch: int) -> None:
    layers = {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}
    draft = random_draft(shallow_target, taps=(0, 1, 2), layers=2, layer=layers)
    texts, count, rows = ids_of(3, batch, 18), jnp.asarray([16, 1, 9][:batch]), 16
    features = shallow_target.forward(texts, taps=draft.taps).taps
    model, shape = draft.graph.merge(draft.params), draft.config.decoder
    cache = empty_cache(2, batch, shape.num_kv_heads, 32, shape.head_dim, jnp.float32)

    @jax.jit
    def read(cache, features, next_ids, start, count):
        return extend(model, cache, features, next_ids, start, count)

    def part(first: int, last: int):
        return features.map(lambda a: a[:, first:last]), texts[:, first + 1 : last + 1]

    hidden, at_once = read(cache, *part(0, rows), jnp.zeros(batch, int), count)
    outputs = []
    for slot in range(rows):
        output, cache = read(cache, *part(slot, slot + 2), jnp.full(batch, slot), jnp.ones(batch, int))
        outputs.append(output[:, 0])
    for b, slots in enumerate(count.tolist()):
        assert relative(hidden[b, 0], outputs[slots - 1][b]) < 1e-5
        for whole, by_one in zip(jax.tree.leaves(at_once), jax.tree.leaves(cache), strict=True):
            assert relative(whole[b, :, :slots], by_one[b, :, :slots]) < 1e-5


def test_the_first_round_equals_training_at_every_depth(results) -> None:
    case = results("base")
    compare_first_round(case.target, case.draft, case.prompts, case.answers, DEPTH, len(case.prompts[0]) + NEW)


def test_served_features_are_those_of_a_plain_forward(results) -> None:
    """What the draft is handed after prefill and after rounds, read from the compiled rounds' own state."""
    case = results("base")
    models, weights = pair(case.target, case.draft)
    ids, lengths = pad_prompts(case.prompts)
    entries = cache_entries(case.target, case.prompts, [NEW] * len(case.prompts), parse_strategy(f"chain:{DEPTH}"))
    state, first = prefill(models, entries, weights, ids, lengths, None)
    assert first.tolist() == [a.tokens[0] for a in case.answers]
    texts = np.asarray([p + a.tokens for p, a in zip(case.prompts, case.answers, strict=True)])
    plain = case.target.forward(texts, taps=case.draft.taps).taps
    hidden = training_outputs(case.draft, plain, texts)
    size = len(case.prompts[0])
    assert relative(state.draft.hidden[:, 0], hidden[:, size - 1]) < 1e-5
    state, committed, unread = next_round(models, parse_strategy(f"chain:{DEPTH}"), weights, state, 0)
    for i, accepted in enumerate(committed.accepted.tolist()):
        assert relative(state.draft.hidden[i, 0], hidden[i, size + accepted]) < 1e-5
    start = np.asarray(state.length)
    for count in (1, 2):  # plain rounds leave the features to the draft
        state, _, unread = next_round(models, PLAIN, weights, state, unread)
        assert unread == count and state.draft.count.tolist() == [count] * len(texts)
    assert state.draft.features.tap_set == plain.tap_set == case.draft.taps
    for i, at in enumerate(start):
        assert state.draft.next_ids[i, :2].tolist() == texts[i, at + 1 : at + 3].tolist()
        for served, full in zip(state.draft.features.arrays, plain.arrays, strict=True):
            assert relative(served[i, :2], full[i, at : at + 2]) < 1e-5
    state = catch_up(models, weights, state)
    for i, at in enumerate(start):
        assert relative(state.draft.hidden[i, 0], hidden[i, at + 1]) < 1e-5


def training_outputs(draft: e3.Draft, features: e3.Taps, texts: np.ndarray) -> jax.Array:
    """The draft's outputs at all slots of whole texts, without a cache."""
    model = draft.graph.merge(draft.params)
    features, next_ids = features.map(lambda a: a[:, :-1]), jnp.asarray(texts[:, 1:], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(next_ids.shape[1]), next_ids.shape)
    attend = causal(jnp.zeros(next_ids.shape, jnp.int32))
    return model(model.project(features), next_ids, positions, attend, ((),) * len(model.layers))[0]


def test_a_round_refuses_features_of_other_taps(golden_pair) -> None:
    models, weights = pair(*golden_pair)
    ids, lengths = pad_prompts([[5, 6, 7]] * 2)
    wrong = models._replace(taps=e3.TapSet([4, 2, 5]))
    with pytest.raises(e3.WiringError, match=r"expected \[block 2 .* got \[block 4"):
        jax.eval_shape(lambda w, i, n: prefill(wrong, 128, w, i, n, None), weights, ids, lengths)

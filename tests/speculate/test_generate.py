"""`generate`: speculation never changes the output, stops where it must, and refuses impossible requests."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.speculate.round import speculate
from eagle3_jax.speculate.strategy import parse_strategy
from tests.tiny import ids_of, not_a_number

NEW = 24
PROMPTS = [ids_of(i, n).tolist() for i, n in ((1, 5), (2, 17), (3, 1), (4, 12))]


@pytest.fixture(scope="module")
def plain(shallow_target) -> list[e3.Result]:
    return e3.generate(shallow_target, None, PROMPTS, max_new_tokens=NEW, stop_token_ids=())


@pytest.fixture(scope="module")
def golden_case(golden_pair, golden):
    """A pair whose draft is often right: (target, draft, prompts, plain answers)."""
    from safetensors.numpy import load_file

    prompts = load_file(golden("chain/base") / "expected.safetensors")["prompts"].tolist()
    answers = e3.generate(golden_pair[0], None, prompts, max_new_tokens=32, stop_token_ids=())
    return *golden_pair, prompts, answers


def tokens(results: list[e3.Result]) -> list[list[int]]:
    return [result.tokens for result in results]


# --- greedy output does not depend on how it was computed


def test_plain_answers_are_full_length_and_differ(plain) -> None:
    assert [len(r.tokens) for r in plain] == [NEW] * 4 and len({tuple(r.tokens) for r in plain}) == 4
    assert {r.finish_reason for r in plain} == {"length"}
    assert all(r.accepted == [0] * (NEW - 1) and r.tau == 1.0 for r in plain)


def test_plain_equals_the_argmax_of_whole_forwards(shallow_target, plain) -> None:
    text = PROMPTS[1] + plain[1].tokens
    logits = shallow_target.forward(np.asarray([text])).logits[0]
    assert np.argmax(logits[len(PROMPTS[1]) - 1 : -1], axis=-1).tolist() == plain[1].tokens


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_random_draft_changes_nothing(shallow_target, shallow_draft, plain, depth: int) -> None:
    answers = e3.generate(
        shallow_target, shallow_draft, PROMPTS, max_new_tokens=NEW, strategy=f"chain:{depth}", stop_token_ids=()
    )
    assert tokens(answers) == tokens(plain)
    assert all(len(d) == depth for answer in answers for d in answer.drafts)


def test_a_draft_of_nans_changes_nothing(shallow_target, shallow_draft, plain) -> None:
    broken = not_a_number(shallow_draft)
    answers = e3.generate(shallow_target, broken, PROMPTS, max_new_tokens=NEW, strategy="chain:3", stop_token_ids=())
    assert tokens(answers) == tokens(plain)


def test_a_ragged_batch_equals_each_prompt_alone(shallow_target, shallow_draft, plain) -> None:
    for prompt, together in list(zip(PROMPTS, plain, strict=True))[:3]:
        chain = e3.generate(
            shallow_target, shallow_draft, prompt, max_new_tokens=NEW, strategy="chain:3", stop_token_ids=()
        )
        assert chain.tokens == together.tokens


def test_drafts_that_are_right_change_nothing(golden_case) -> None:
    target, draft, prompts, plain = golden_case
    answers = e3.generate(target, draft, prompts, max_new_tokens=32, strategy="chain:5", stop_token_ids=())
    assert tokens(answers) == tokens(plain)
    assert max(a for answer in answers for a in answer.accepted) == 5
    for answer in answers:
        assert 1 + sum(a + 1 for a in answer.accepted) >= 32 > 1 + sum(a + 1 for a in answer.accepted[:-1])


# --- where an answer ends


def test_an_answer_ends_with_the_first_stop_token_wherever_it_lies(golden_case) -> None:
    target, draft, prompts, plain = golden_case
    inside_a_block = 0
    for answer in plain:
        for stop in dict.fromkeys(answer.tokens[:12]):
            expected = answer.tokens[: answer.tokens.index(stop) + 1]
            results = e3.generate(target, draft, prompts, max_new_tokens=32, strategy="chain:5", stop_token_ids=[stop])
            for result, full in zip(results, plain, strict=True):
                cut = full.tokens.index(stop) + 1 if stop in full.tokens else 32
                assert result.tokens == full.tokens[:cut]
                assert result.finish_reason == ("stop" if stop in full.tokens[:32] else "length")
                committed = 1 + sum(a + 1 for a in result.accepted)
                inside_a_block += result.finish_reason == "stop" and committed > cut
            assert expected in tokens(results)
    assert inside_a_block > 0  # a stop token among accepted drafts was really met; `accepted` is not trimmed


def test_the_targets_own_end_tokens_are_the_default(golden_case) -> None:
    target, draft, prompts, plain = golden_case
    end = plain[0].tokens[3]
    ending = dataclasses.replace(target, eos_token_ids=(end,))
    for strategy, paired in (("plain", None), ("chain:5", draft)):
        result = e3.generate(ending, paired, prompts, max_new_tokens=32, strategy=strategy)[0]
        assert (result.tokens, result.finish_reason) == (plain[0].tokens[: plain[0].tokens.index(end) + 1], "stop")
        full = e3.generate(ending, paired, prompts, max_new_tokens=32, strategy=strategy, stop_token_ids=())[0]
        assert (full.tokens, full.finish_reason) == (plain[0].tokens, "length")


@pytest.mark.parametrize("limit", [1, 2, 7, 8])
def test_max_new_tokens_is_exact(golden_case, limit: int) -> None:
    target, draft, prompts, plain = golden_case
    answers = e3.generate(target, draft, prompts, max_new_tokens=limit, strategy="chain:5", stop_token_ids=())
    assert tokens(answers) == [r.tokens[:limit] for r in plain]
    assert {r.finish_reason for r in answers} == {"length"}
    if limit == 1:  # prefill alone: no round
        assert all(r.accepted == r.drafts == [] and r.tau == 1.0 for r in answers)


def test_a_stop_token_at_the_limit_counts_as_stop(golden_case) -> None:
    target, draft, prompts, plain = golden_case
    first = plain[0].tokens[0]
    result = e3.generate(target, draft, prompts, max_new_tokens=1, strategy="chain:5", stop_token_ids=[first])[0]
    assert (result.tokens, result.finish_reason) == ([first], "stop")


@pytest.mark.parametrize("room", [1, 4, 9])
def test_the_context_limit_is_exact_even_in_the_middle_of_a_block(golden_case, room: int) -> None:
    target, draft, prompts, plain = golden_case
    config = dataclasses.replace(target.config, max_positions=len(prompts[0]) + room)
    small = dataclasses.replace(target, config=config)
    for strategy, paired in (("plain", None), ("chain:5", draft)):
        answers = e3.generate(small, paired, prompts, max_new_tokens=32, strategy=strategy, stop_token_ids=())
        assert tokens(answers) == [r.tokens[:room] for r in plain], strategy
        assert {r.finish_reason for r in answers} == {"length"}


def test_requests_end_one_by_one(shallow_target, shallow_draft, plain) -> None:
    """Rows that have finished stay in the batch and must not disturb the others."""
    stop = plain[2].tokens[2]
    answers = e3.generate(
        shallow_target, shallow_draft, PROMPTS, max_new_tokens=NEW, strategy="chain:3", stop_token_ids=[stop]
    )
    for answer, full in zip(answers, plain, strict=True):
        cut = full.tokens.index(stop) + 1 if stop in full.tokens else NEW
        assert answer.tokens == full.tokens[:cut]


def test_tokens_are_reported_as_they_are_committed(golden_case) -> None:
    target, draft, prompts, plain = golden_case
    heard: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    calls = []

    def hear(i: int, new: list[int]) -> None:
        calls.append((i, len(new)))
        heard[i] += new

    e3.generate(target, draft, prompts, max_new_tokens=32, strategy="chain:5", stop_token_ids=(), on_tokens=hear)
    assert list(heard.values()) == tokens(plain)
    assert calls[: len(prompts)] == [(i, 1) for i in range(len(prompts))] and max(n for _, n in calls) == 6


# --- sampling


@pytest.fixture(scope="module")
def sampled(golden_case) -> list[e3.Result]:
    target, _, prompts, _ = golden_case
    return e3.generate(target, None, prompts, max_new_tokens=24, temperature=0.4, top_p=0.95, seed=7, stop_token_ids=())


def test_the_same_seed_gives_the_same_samples_with_speculation(golden_case, sampled) -> None:
    target, draft, prompts, greedy = golden_case
    settings = {"max_new_tokens": 24, "temperature": 0.4, "top_p": 0.95, "stop_token_ids": ()}
    chain = e3.generate(target, draft, prompts, strategy="chain:5", seed=7, **settings)
    assert tokens(chain) == tokens(sampled) != [r.tokens[:24] for r in greedy]
    assert sum(a for answer in chain for a in answer.accepted) > 0
    again = e3.generate(target, draft, prompts, strategy="chain:5", seed=8, **settings)
    assert tokens(again) != tokens(sampled)
    unseeded = [tokens(e3.generate(target, draft, prompts, strategy="chain:5", **settings)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_request_i_of_a_batch_uses_seed_plus_i(golden_case, sampled) -> None:
    target, _, prompts, _ = golden_case
    settings = {"max_new_tokens": 24, "temperature": 0.4, "top_p": 0.95, "stop_token_ids": ()}
    alone = e3.generate(target, None, prompts[2], seed=9, **settings)
    assert alone.tokens == sampled[2].tokens


# --- shapes are compiled once


def test_mixed_lengths_compile_nothing_new(golden_case) -> None:
    target, draft, prompts, _ = golden_case
    settings = {"max_new_tokens": 8, "strategy": "chain:5", "stop_token_ids": ()}
    e3.generate(target, draft, prompts, **settings)
    before = speculate._cache_size()
    e3.generate(target, draft, [p[:n] for p, n in zip(prompts, (1, 5, 9, 12), strict=True)], **settings)
    assert speculate._cache_size() == before


# --- requests that cannot be served


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "no prompt"),
        ({"prompt_ids": [[5], []]}, "prompt 1 is empty"),
        ({"prompt_ids": [5] * 128}, "prompt 0 has 128 tokens, the target's context is 128"),
        ({"prompt_ids": [5, 512]}, r"outside 0\.\.511"),
        ({"prompt_ids": [-1]}, r"outside 0\.\.511"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_k": -1}, "top_k -1"),
        ({"strategy": "chain"}, "'chain' is not known"),
        ({"strategy": "chain:3"}, "chain:3 needs a draft"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(shallow_target, changes: dict, message: str) -> None:
    with pytest.raises(e3.UserError, match=message) as caught:
        e3.generate(shallow_target, None, **({"prompt_ids": [5, 6]} | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompts", ["text", ["text"], [1.5, 2.0], [[5], [6.0]], [None], [[[5]]]], ids=str)
def test_prompts_that_are_no_token_ids_are_refused_in_one_line(shallow_target, prompts, untyped) -> None:
    with pytest.raises(e3.UserError, match="prompt_ids holds") as caught:
        e3.generate(shallow_target, None, prompts)
    assert "\n" not in str(caught.value)


def test_prompts_and_lengths_may_be_numpys(shallow_target, plain, untyped) -> None:
    settings = {"max_new_tokens": np.int64(NEW), "stop_token_ids": ()}
    rows = [PROMPTS[1]] * 4  # as many as in `plain`, for which programs are compiled
    for prompts in (np.asarray(rows), jnp.asarray(rows), [jnp.asarray(row) for row in rows], tuple(map(tuple, rows))):
        assert e3.generate(shallow_target, None, prompts, **settings)[0].tokens == plain[1].tokens


@pytest.mark.parametrize(
    "strategy", ["", "plain:1", "chain:0", "chain:-1", "chain:33", "chain:x", "chain:1:2", "greedy"]
)
def test_unknown_strategies_are_refused(strategy: str) -> None:
    with pytest.raises(e3.UserError, match="is not known"):
        parse_strategy(strategy)


def test_known_strategies() -> None:
    assert [parse_strategy(s).depth for s in ("plain", "chain:1", "chain:32")] == [0, 1, 32]

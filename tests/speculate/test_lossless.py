"""Trees, sampling settings and ragged batches never change a text; stops and limits are exact within a block.

Small targets whose bigrams the draft knows (tests/tiny.py): `oracle` is always right, `fair` often, `broken` is NaN.
"""

import dataclasses

import jax
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.speculate import generate as generating
from eagle3_jax.speculate.generate import cache_entries, padded_length
from eagle3_jax.speculate.request import check_params, device_sampling, spread
from eagle3_jax.speculate.round import next_round, prefill, speculate
from eagle3_jax.speculate.strategy import PLAIN, parse_strategy
from tests.tiny import bigram_draft, bigram_target, not_a_number

VOCAB, NEW = 64, 24
PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 2], [60], list(range(20, 33))]
STATIC = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
STRATEGIES = ["chain:3", "tree:3x3x9", STATIC]
SETTINGS = [
    e3.SamplingParams(NEW, seed=1, stop_token_ids=()),
    e3.SamplingParams(NEW, temperature=1.0, top_p=0.9, min_p=0.02, seed=2, stop_token_ids=()),
    e3.SamplingParams(
        NEW, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={7: 1.5, 9: -100.0}
    ),
    e3.SamplingParams(NEW, temperature=0.8, top_k=9, frequency_penalty=0.7, min_tokens=20, seed=4, stop_token_ids=[47]),
]


@pytest.fixture(scope="module")
def target() -> e3.Target:
    return bigram_target(VOCAB, context=0.5)


@pytest.fixture(scope="module")
def drafts(target) -> dict[str, e3.Draft]:
    fair = bigram_draft(target, 0.1)
    return {"fair": fair, "random": bigram_draft(target, 5.0), "broken": not_a_number(fair)}


@pytest.fixture(scope="module")
def plain(target) -> list[e3.Result]:
    return e3.generate(target, None, PROMPTS, NEW)


def tokens(results: list[e3.Result]) -> list[list[int]]:
    return [result.tokens for result in results]


# --- any draft, any tree


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_any_draft_gives_the_plain_text(target, drafts, plain, strategy) -> None:
    taus = {}
    for name, draft in drafts.items():
        answers = e3.generate(target, draft, PROMPTS, NEW, strategy)
        assert tokens(answers) == tokens(plain), name
        taus[name] = np.mean([answer.tau for answer in answers])
        for answer in answers:
            assert answer.nonfinite_rounds == (len(answer.accepted) if name == "broken" else 0)
            start = 1
            for accepted, proposed in zip(answer.accepted, answer.drafts, strict=True):
                assert accepted <= len(proposed) <= 3
                end = min(accepted, NEW - start)
                assert proposed[:end] == answer.tokens[start : start + end]
                start += accepted + 1
    assert taus["fair"] > taus["random"] + 0.1


def test_tokens_that_give_nan_change_nothing_where_they_are_padding_or_rejected(target) -> None:
    """Token 0 pads prompts and is all that the draft proposes; the target never chooses it."""
    head, model = target.params["lm_head"]["weight"], target.params["model"]
    params = {**target.params, "lm_head": {"weight": head.at[0].set(0)}}
    embed = {"weight": model["embed_tokens"]["weight"].at[0].set(np.nan)}
    whole = dataclasses.replace(target, params=params)
    broken = dataclasses.replace(target, params={**params, "model": {**model, "embed_tokens": embed}})
    expected = tokens(e3.generate(whole, None, PROMPTS, NEW))
    assert not any(0 in text for text in expected)
    assert tokens(e3.generate(broken, None, PROMPTS, NEW)) == expected
    answers = e3.generate(broken, bigram_draft(target, d2t=[0]), PROMPTS, NEW, "chain:3")
    assert tokens(answers) == expected and answers[0].drafts[0] == [0, 0, 0]


def test_a_round_dispatched_ahead_changes_nothing(target, drafts, monkeypatch) -> None:
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return next_round(*arguments)

    monkeypatch.setattr(generating, "next_round", counted)
    expected = e3.generate(target, drafts["fair"], PROMPTS, NEW, "tree:3x3x9")
    rounds = len(calls)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert e3.generate(target, drafts["fair"], PROMPTS, NEW, "tree:3x3x9") == expected
    assert len(calls) == 2 * rounds + 1
    assert e3.generate(target, drafts["fair"], PROMPTS, 1, "tree:3x3x9")[0].tokens == expected[0].tokens[:1]
    assert len(calls) == 2 * rounds + 1  # where prefill is all, no round is begun


def test_a_tree_of_top_1_is_the_chain(target, drafts) -> None:
    chain, tree = (e3.generate(target, drafts["fair"], PROMPTS, NEW, s) for s in ("chain:3", "tree:3x1x4"))
    assert chain == tree


def test_an_oracle_in_place_of_any_draft_is_always_right(target, drafts, plain) -> None:
    answers = tokens(plain)
    told = e3.generate(target, drafts["random"], PROMPTS, NEW - 4, "chain:3", oracle=answers)
    assert tokens(told) == [text[: NEW - 4] for text in answers]
    assert {(count, answer.tau) for answer in told for count in answer.accepted} == {(3, 4.0)}  # the target's own too
    with pytest.raises(e3.UserError, match="one for each prompt"):
        e3.generate(target, drafts["random"], PROMPTS, NEW, "chain:3", oracle=answers[:2])
    with pytest.raises(e3.UserError, match="a chain as strategy"):
        e3.generate(target, drafts["random"], PROMPTS, NEW, "tree:3x3x9", oracle=answers)


def test_acceptance_does_not_depend_on_the_size_of_a_batch(target, drafts, plain) -> None:
    together = e3.generate(target, drafts["fair"], PROMPTS, NEW, "chain:3")
    assert sum(sum(answer.accepted) for answer in together) > 0
    assert e3.generate(target, drafts["fair"], PROMPTS[:1], NEW, "chain:3") == together[:1]


# --- sampling settings, each request's own


def test_temperatures_that_are_as_good_as_zero_are_greedy_beside_others(target, drafts, plain, mixed) -> None:
    for value in (0.0, 1e-9):
        settings = [dataclasses.replace(SETTINGS[0], temperature=value), *SETTINGS[1:]]
        for strategy, draft in (("plain", None), ("chain:3", drafts["fair"])):
            answers = e3.generate(target, draft, PROMPTS, strategy=strategy, sampling=settings)
            assert tokens(answers) == tokens(mixed) and answers[0].tokens == plain[0].tokens


@pytest.fixture(scope="module")
def mixed(target) -> list[e3.Result]:
    return e3.generate(target, None, PROMPTS, sampling=SETTINGS)


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
def test_a_seed_gives_the_same_text_with_any_settings(target, drafts, plain, mixed, strategy) -> None:
    answers = e3.generate(target, drafts["fair"], PROMPTS, strategy=strategy, sampling=SETTINGS)
    assert tokens(answers) == tokens(mixed) and mixed[0].tokens == plain[0].tokens
    assert sum(sum(answer.accepted) > 0 for answer in answers) >= 3
    if strategy.startswith("tree"):  # alone: the same text in the same rounds
        alone = e3.generate(target, drafts["fair"], PROMPTS[1], strategy=strategy, sampling=SETTINGS[1])
        assert (alone.tokens, alone.accepted) == (answers[1].tokens, answers[1].accepted)


def test_one_set_of_settings_gives_each_request_a_seed_of_its_own(target, drafts) -> None:
    """Request i has seed + i; without a seed each call has another. All settings are in use, as in `mixed`."""
    one = dataclasses.replace(SETTINGS[3], top_p=0.9, min_p=0.02, repetition_penalty=1.1, logit_bias={7: 0.5}, seed=7)
    together = tokens(e3.generate(target, drafts["fair"], PROMPTS, strategy="chain:3", sampling=one))
    single = [dataclasses.replace(one, seed=7 + i) for i in range(len(PROMPTS))]
    assert tokens(e3.generate(target, None, PROMPTS, sampling=single)) == together
    assert tokens(e3.generate(target, None, PROMPTS, sampling=dataclasses.replace(one, seed=8))) != together
    unseeded = [e3.generate(target, None, PROMPTS, sampling=dataclasses.replace(one, seed=None)) for _ in range(2)]
    assert tokens(unseeded[0]) != tokens(unseeded[1])


def test_processors_act_on_every_token_with_those_before_it(target, mixed) -> None:
    """The penalised request, token by token, from whole forwards and plain numpy."""
    params, text = SETTINGS[2], list(PROMPTS[2])
    answer = mixed[2].tokens
    for i, token in enumerate(answer):
        padded = np.zeros((1, 32), int)
        padded[0, : len(text)] = text
        logits = np.array(target.forward(padded, lengths=[len(text)]).logits[0, len(text) - 1], np.float64)
        for t, bias in params.logit_bias.items():
            logits[t] += bias
        for t in set(text):
            logits[t] = logits[t] / 1.4 if logits[t] > 0 else logits[t] * 1.4
        for t in set(answer[:i]):
            logits[t] -= 0.3 + 0.2 * answer[:i].count(t)
        assert int(np.argmax(logits)) == token, i
        text.append(token)
    assert 9 not in answer and len(set(answer)) > len(set(answer[:8]))


def test_min_tokens_hold_a_stop_token_back_and_no_longer(target, drafts) -> None:
    for least, stop in ((0, 11), (1, 50), (3, 11), (8, 2)):
        params = e3.SamplingParams(NEW, min_tokens=least, stop_token_ids=[stop], logit_bias={stop: 30.0})
        for strategy, draft in (("plain", None), ("chain:3", drafts["fair"])):
            # Beside the others, whose settings have programs compiled already.
            answer = e3.generate(target, draft, PROMPTS, strategy=strategy, sampling=[params, *SETTINGS[1:]])[0]
            assert (answer.tokens.index(stop), answer.finish_reason) == (least, "stop")
            assert len(answer.tokens) == least + 1


def test_sampled_drafts_repeat_with_the_seed_alone_or_in_a_batch(target, drafts, plain) -> None:
    settings = [dataclasses.replace(p, temperature=t) for p, t in zip(SETTINGS, (0.0, 1.0, 0.7, 0.8), strict=True)]
    settings = [dataclasses.replace(p, seed=i) for i, p in enumerate(settings)]
    run = lambda prompts, sampling: e3.generate(  # noqa: E731
        target, drafts["fair"], prompts, strategy="tree:3x3x9", sampling=sampling, sample_draft=True
    )
    answers = run(PROMPTS, settings)
    assert answers == run(PROMPTS, settings)
    assert run(PROMPTS[::-1], settings[::-1]) == answers[::-1]
    assert answers[0].tokens == plain[0].tokens  # greedy requests of the batch stay greedy
    assert sum(sum(answer.accepted) for answer in answers) > 0
    others = [dataclasses.replace(p, seed=i + 10) for i, p in enumerate(settings)]
    assert run(PROMPTS, others)[1].tokens != answers[1].tokens
    broken = e3.generate(target, drafts["broken"], PROMPTS, strategy="tree:3x3x9", sampling=settings, sample_draft=True)
    assert broken[0].tokens == plain[0].tokens


def test_a_bias_that_a_temperature_makes_infinite_is_certain(target, drafts) -> None:
    certain = dataclasses.replace(SETTINGS[1], temperature=0.5, logit_bias={7: 3e38})
    for sampled in (False, True):  # as above, so that programs are compiled
        strategy = "tree:3x3x9" if sampled else "chain:3"
        settings = {"sampling": [certain, *SETTINGS[1:]], "sample_draft": sampled}
        answer = e3.generate(target, drafts["fair"], PROMPTS, strategy=strategy, **settings)[0]
        assert answer.tokens == [7] * NEW


# --- where answers end


@pytest.fixture(scope="module")
def oracle():
    """A pure bigram target, its draft that is always right, and the plain answers."""
    target = bigram_target(VOCAB)
    draft = bigram_draft(target)
    return target, draft, e3.generate(target, None, PROMPTS, NEW)


@pytest.mark.parametrize("strategy", ["chain:3", "tree:3x3x9"])
def test_an_oracle_is_always_right_and_a_stop_at_any_place_of_a_block_ends_the_answer(oracle, strategy: str) -> None:
    target, draft, plain = oracle
    answers = e3.generate(target, draft, PROMPTS, NEW, strategy)
    accepted = {a for answer in answers for a in answer.accepted}
    # A tree goes where the draft's probabilities are highest, which need not be to the end of the likeliest path.
    assert tokens(answers) == tokens(plain) and accepted <= ({3} if strategy == "chain:3" else {2, 3})
    for place in range(8):
        stop = plain[0].tokens[place]
        cut = plain[0].tokens.index(stop) + 1
        answer = e3.generate(target, draft, PROMPTS, NEW, strategy, stop_token_ids=[stop])[0]
        assert (answer.tokens, answer.finish_reason) == (plain[0].tokens[:cut], "stop")


@pytest.mark.parametrize("strategy", ["chain:3", "tree:3x3x9"])
def test_requests_of_any_length_end_exactly_and_disturb_nobody(oracle, strategy: str) -> None:
    target, draft, plain = oracle
    lengths = (1, 2, 5, 24)
    params = [e3.SamplingParams(n) for n in lengths]
    answers = e3.generate(target, draft, PROMPTS, strategy=strategy, sampling=params)
    assert tokens(answers) == [p.tokens[:n] for p, n in zip(plain, lengths, strict=True)]
    assert {a.finish_reason for a in answers} == {"length"}


@pytest.mark.parametrize("room", [1, 2, 4, 7])
def test_the_context_limit_is_exact_within_a_tree(oracle, room: int) -> None:
    target, draft, plain = oracle
    longest = len(PROMPTS[3])
    small = dataclasses.replace(target, config=dataclasses.replace(target.config, max_positions=longest + room))
    answers = e3.generate(small, draft, PROMPTS, NEW, "tree:3x3x9")
    for prompt, answer, full in zip(PROMPTS, answers, plain, strict=True):
        assert answer.tokens == full.tokens[: min(NEW, longest + room - len(prompt))]
        assert answer.finish_reason == "length"


def test_a_draft_with_a_shorter_window_goes_on(target, drafts, plain) -> None:
    """Its positions are computed, not looked up in a table that ends."""
    short = bigram_draft(target, 0.1, max_positions=8)
    assert tokens(e3.generate(target, short, PROMPTS, NEW, "chain:3")) == tokens(plain)


def test_a_full_cache_is_never_written_past_its_end(oracle) -> None:
    """Rounds go on for a request that has ended: it stays at the end of its cache, and others are not touched."""
    from eagle3_jax.speculate.generate import pad_prompts, pair
    from eagle3_jax.speculate.round import cache_room

    target, draft, _ = oracle
    shape = parse_strategy("tree:3x3x9")
    models, weights = pair(target, draft)
    entries = cache_entries(target, PROMPTS, [NEW] * len(PROMPTS), shape)
    state, _ = prefill(models, entries, weights, *pad_prompts(PROMPTS), None)
    for _ in range(70):
        state, _ = speculate(models, shape, weights, state)
    assert state.length.tolist() == [entries - cache_room(shape, len(PROMPTS))] * len(PROMPTS)


def test_mixed_lengths_compile_nothing_new(target, drafts) -> None:
    e3.generate(target, drafts["fair"], PROMPTS, NEW, "tree:3x3x9")
    before = speculate._cache_size()
    e3.generate(target, drafts["fair"], [[1], [2] * 30, [3, 4], [5] * 7], 9, "tree:3x3x9", stop_token_ids=[1, 2, 3])
    assert speculate._cache_size() == before


def test_lengths_compile_one_program_for_each_power_of_two(target) -> None:
    def run(*lengths: int) -> int:
        for length in lengths:
            e3.generate(target, None, [5] * length, 2)
        return prefill._cache_size() + speculate._cache_size()

    assert run(20, 40, 100) == run(1, 32, 33, 64, 65, 80, 96, 97, 120)


def test_sizes_are_powers_of_two_up_to_the_context(target) -> None:
    assert {padded_length(n) for n in range(1, 1025)} == {32, 64, 128, 256, 512, 1024}
    wide = dataclasses.replace(target, config=dataclasses.replace(target.config, max_positions=1300))
    entries = {(n, new): cache_entries(wide, [[0] * n], [new], PLAIN) for n in range(1, 1300) for new in (1, 300, 9999)}
    assert {size - 16 for size in entries.values()} == {128, 256, 512, 1024, 1408, 2048}
    for (n, new), size in entries.items():  # 2048: to which a prompt of more than 1024 is padded
        assert size - 16 >= max(min(n + new, 1300), padded_length(n)) and (size < 2064 or n > 1024)
    alike = [parse_strategy(s) for s in ("plain", "chain:5", "tree:3x4x12")]
    assert {cache_entries(wide, [[0] * 60], [64], *shapes) for shapes in [*([s] for s in alike), alike]} == {144}


# --- requests that cannot be served


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_p": 1.0}, "min_p 1.0"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"presence_penalty": float("nan")}, "presence_penalty nan"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty inf"),
        ({"logit_bias": {64: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9"),
        ({"min_tokens": -1}, "min_tokens -1"),
        ({"stop_token_ids": [64]}, "64 is outside"),
        ({"logit_bias": {3: 1e39}}, "logit_bias"),
        ({"temperature": 1e39}, "temperature 1e"),
        ({"sampling": e3.SamplingParams(), "temperature": 1.0}, "put all of them into sampling="),
        ({"sampling": [e3.SamplingParams()] * 2}, "2 sampling settings for 1 prompts"),
        ({"strategy": "tree:2x65x66"}, "the draft's vocabulary has 64"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(target, drafts, changes: dict, message: str) -> None:
    with pytest.raises(e3.UserError, match=message) as caught:
        e3.generate(target, drafts["fair"], [5, 6], **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("top_k", 1.5), ("min_tokens", 0.5), ("max_new_tokens", "8"), ("seed", 1.5), ("seed", "x")),
        *(("temperature", "hot"), ("top_p", None), ("logit_bias", {5: "x"}), ("logit_bias", [5])),
        *(("logit_bias", {"5": 1.0}), ("stop_token_ids", 5), ("stop_token_ids", ["5"])),
    ],
)
def test_settings_of_a_wrong_type_are_refused_in_one_line(setting: str, value, untyped) -> None:
    with pytest.raises(e3.UserError, match=setting) as caught:
        check_params(e3.SamplingParams(**{setting: value}), VOCAB)
    assert "\n" not in str(caught.value)
    if setting == "seed":
        with pytest.raises(e3.UserError, match="seed"):
            spread(e3.SamplingParams(seed=value), 2)


def test_settings_beyond_any_size_are_as_good_as_the_largest(target) -> None:
    params = e3.SamplingParams(10**12, temperature=1.0, top_k=10**10, min_tokens=10**11, seed=10**30)
    sampling = device_sampling(dataclasses.replace(target, eos_token_ids=(2,)), [[3, 4]], [params])
    assert sampling.random.top_k.tolist() == [VOCAB]
    assert sampling.min_tokens.until.tolist() == [2 + target.config.max_positions]
    assert np.flatnonzero(sampling.min_tokens.stops[0]).tolist() == [2]

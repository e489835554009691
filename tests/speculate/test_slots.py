"""Many requests through a fixed batch give what each gives alone, in whatever order they finish."""

import jax
import pytest

import eagle3_jax as e3
from eagle3_jax.speculate.round import speculate
from eagle3_jax.speculate.slots import Request, generate_many
from tests.tiny import ids_of

NEW = 10
PROMPTS = [ids_of(i, 1 + 5 * i % 23).tolist() for i in range(7)]


def requests() -> list[Request]:
    return [Request(10 + i, prompt) for i, prompt in enumerate(PROMPTS)]


def run(target: e3.Target, given: list[Request], slots: int, **settings) -> dict[int, list[int]]:
    finished = list(generate_many(target, given, max_prompt=24, max_new_tokens=NEW, slots=slots, **settings))
    assert len(finished) == len(given) == len({request.index for request in finished})
    return {request.index: request.tokens for request in finished}


@pytest.fixture(scope="module")
def alone(shallow_target) -> dict[int, list[int]]:
    answers = e3.generate(shallow_target, None, PROMPTS, max_new_tokens=NEW, stop_token_ids=())
    return {10 + i: answer.tokens for i, answer in enumerate(answers)}


def test_every_request_gets_its_own_answer(shallow_target, alone) -> None:
    assert run(shallow_target, requests(), 3, stop=frozenset()) == alone


def test_a_step_dispatched_ahead_changes_nothing(shallow_target, alone, monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert run(shallow_target, requests(), 3, stop=frozenset()) == alone
    stop = frozenset({alone[10][1], alone[13][0]})
    ahead = run(shallow_target, requests(), 3, stop=stop)
    monkeypatch.undo()
    assert ahead == run(shallow_target, requests(), 3, stop=stop)


def test_requests_that_stop_early_make_room(shallow_target, alone) -> None:
    stop = frozenset({alone[10][1], alone[13][0], alone[15][4]})
    expected = {}
    for index, tokens in alone.items():
        ends = [i for i, token in enumerate(tokens) if token in stop]
        expected[index] = tokens[: ends[0] + 1] if ends else tokens
    assert run(shallow_target, requests(), 3, stop=stop) == expected
    assert {len(tokens) for tokens in expected.values()} > {1, NEW}


def test_fewer_requests_than_slots(shallow_target, alone) -> None:
    assert run(shallow_target, requests()[:2], 3, stop=frozenset()) == {i: alone[i] for i in (10, 11)}


def test_no_requests(shallow_target) -> None:
    assert run(shallow_target, [], 3) == {}


def test_samples_are_the_requests_own(shallow_target) -> None:
    settings = {"temperature": 0.9, "top_p": 0.95, "seed": 3, "stop": frozenset()}
    narrow = run(shallow_target, requests(), 3, **settings)
    assert narrow == run(shallow_target, requests()[::-1], 3, **settings)
    for index in (10, 14):  # the seed of a request is seed + index
        # a batch of seven as in `alone`: the request's seed is that of its first row
        reference = e3.generate(
            shallow_target,
            None,
            [PROMPTS[index - 10]] * 7,
            NEW,
            temperature=0.9,
            top_p=0.95,
            seed=3 + index,
            stop_token_ids=(),
        )
        assert reference[0].tokens == narrow[index]


def test_coming_and_going_compiles_nothing_new(shallow_target) -> None:
    run(shallow_target, requests()[:4], 3, stop=frozenset())
    before = speculate._cache_size()
    run(shallow_target, requests(), 3, stop=frozenset())
    assert speculate._cache_size() == before

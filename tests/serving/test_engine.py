"""The engine gives every request what it would get alone, whatever comes and goes around it.

One engine for the whole file: a bigram target of one block whose context matters, and a draft that is sometimes right
and attends to what it has read, so that a wrong cache entry of either shows.
"""

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.errors import UserError
from eagle3_jax.serving.engine import Engine
from eagle3_jax.serving.metrics import Metrics
from eagle3_jax.serving.observed import Observed
from eagle3_jax.serving.requests import Delta, EngineStopped, QueueFull, Settings
from tests.serving.asking import NEW, accepted, asked, collect, run, tokens
from tests.tiny import bigram_draft, bigram_target, ids_of, not_a_number

VOCAB = 64
POISON = VOCAB - 1  # its embedding is NaN, and no answer has it
TREE = "tree:2x2x4"
STRATEGIES = ("plain", TREE)
SETTINGS = Settings(slots=2, max_len=88, strategy=TREE, strategies=STRATEGIES, queue=20, chunk=20)
PROMPTS = [ids_of(i, n, vocab_size=VOCAB - 1).tolist() for i, n in enumerate((1, 5, 16, 19, 20, 21, 40, 60))]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
ODD = {token: -1e9 for token in range(1, VOCAB, 2)}
READY = "ready"
compiled: list[str] = []  # programs, and when the engine was READY


@pytest.fixture(scope="module")
def pair() -> tuple[e3.Target, e3.Draft]:
    target = bigram_target(VOCAB, context=0.8)
    params = target.params
    embedding = params["model"]["embed_tokens"]["weight"].at[POISON].set(np.nan)
    head = params["lm_head"]["weight"].at[POISON].set(0)
    params = params | {"model": params["model"] | {"embed_tokens": {"weight": embedding}}, "lm_head": {"weight": head}}
    target = dataclasses.replace(target, params=params)
    draft = bigram_draft(target, noise=0.05)
    attention = draft.params["layers"][0]["self_attn"]
    for name in ("q_proj", "k_proj"):  # its slots see each other
        attention[name]["bias"] = 0.3 * attention[name]["bias"]
    return target, draft


@pytest.fixture(scope="module")
def engine(pair, tmp_path_factory) -> Iterator[Engine]:
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **facts: compiled.append(event) if "jaxpr_to_mlir" in event else None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("costs")))
        engine = Engine(*pair, SETTINGS)
        engine.start()
        while engine.state == "warming":
            time.sleep(0.1)
        compiled.append(READY)
        yield engine
        asyncio.run(engine.drain(10))
    assert engine.state == "stopped" and engine.error is None


@pytest.fixture(scope="module")
def alone(pair) -> dict[str, list[e3.Result]]:
    """What `generate` answers to PROMPTS."""
    return {
        name: e3.generate(*pair, PROMPTS, max_new_tokens=NEW, strategy=name, stop_token_ids=()) for name in STRATEGIES
    }


@pytest.fixture(scope="module")
def special(pair, alone) -> list[e3.Result]:
    """What `generate` answers to PROMPTS with unusual settings: sampled, even tokens only, none of STOP before nine."""
    stop = (alone["plain"][6].tokens[2],)
    unusual = {3: SAMPLED | {"seed": 3}, 2: {"logit_bias": ODD}, 6: {"stop_token_ids": stop, "min_tokens": 9}}
    params = [e3.SamplingParams(NEW, **({"stop_token_ids": ()} | unusual.get(i, {}))) for i in range(len(PROMPTS))]
    return e3.generate(*pair, PROMPTS, strategy=TREE, sampling=params)


@pytest.fixture(scope="module")
def forgetful(engine) -> Iterator[Engine]:
    """An engine of the same shapes, hence of the same programs, that reads every prompt from the start."""
    other = Engine(engine._target, engine._draft, dataclasses.replace(SETTINGS, prefix_reuse=False))
    other.start()
    yield other
    asyncio.run(other.drain(10))


def idle(engine: Engine) -> bool:
    """Whether, within ten seconds, everything is free again."""
    end = time.monotonic() + 10
    while engine.stats().running + engine.stats().waiting + engine.stats().kv_tokens_used and time.monotonic() < end:
        time.sleep(0.01)
    return not engine._live and not engine._scheduler.running and len(engine._cache.free) == SETTINGS.slots


def test_traffic(alone, engine) -> None:
    """Requests of all kinds come, stop, are cancelled; the greedy ones get their answers. The first test of the engine:
    nothing but the warm-up can have compiled what it needs."""
    draw = random.Random(0)

    async def one(i: int) -> None:
        await asyncio.sleep(draw.random() * 0.2)
        which, kind = draw.randrange(len(PROMPTS)), draw.choice(["greedy"] * 3 + ["cancel", "stop", "sampled", "late"])
        whole, new = alone["plain"][which].tokens, draw.randrange(1, NEW + 1)
        request = asked(f"traffic {i}", PROMPTS[which], new, strategy=draw.choice([*STRATEGIES, "auto", None]))
        if kind == "stop":
            stop = whole[draw.randrange(NEW)]
            params = dataclasses.replace(request.params, stop_token_ids=(stop,))
            request, whole = dataclasses.replace(request, params=params), whole[: whole.index(stop)]
        if kind == "sampled":
            params = dataclasses.replace(request.params, temperature=1.0, top_k=9, presence_penalty=0.5)
            request = dataclasses.replace(request, params=params, logprobs=2)
        if kind == "late":
            request = dataclasses.replace(request, deadline=0.0)
        got: list[Delta] = []
        async for delta in engine.stream(request):
            got.append(delta)
            if kind == "cancel" and len(got) == 2:
                return
        if kind == "late":
            assert got[-1].finish_reason == "deadline"
        elif kind == "sampled":
            assert len(tokens(got)) == new
        else:
            assert tokens(got) == whole[:new], (kind, request)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(i) for i in range(20)))
        await asyncio.gather(*(one(i) for i in range(20, 40)))

    asyncio.run(all_of_them())
    assert compiled[compiled.index(READY) + 1 :] == []
    assert idle(engine)


# --- one request is itself


@pytest.mark.parametrize("name", STRATEGIES)
def test_answers_and_acceptance_are_those_of_generate(engine, alone, name) -> None:
    requests = [asked(f"{name} {i}", prompt, strategy=name) for i, prompt in enumerate(PROMPTS)]
    for deltas, reference in zip(run(engine, *requests), alone[name], strict=True):
        assert tokens(deltas) == reference.tokens and deltas[-1].finish_reason == "length"
        assert accepted(deltas) == reference.accepted
        assert {delta.strategy for delta in deltas[1:]} == {name} and deltas[0].accepted is None
    assert name == "plain" or sum(sum(r.accepted) for r in alone[name]) > 20


def test_depths_name_the_accepted_draft_tokens(engine) -> None:
    for delta in run(engine, asked("depths", PROMPTS[1]))[0][1:-1]:
        assert delta.depths == (*range(1, delta.accepted + 1), 0)


def test_strategies_take_turns(engine, alone) -> None:
    names = [STRATEGIES[i % 2] for i in range(len(PROMPTS))]
    requests = [asked(f"turns {i}", prompt, strategy=names[i]) for i, prompt in enumerate(PROMPTS)]
    for i, deltas in enumerate(run(engine, *requests)):
        assert tokens(deltas) == alone[names[i]][i].tokens and accepted(deltas) == alone[names[i]][i].accepted


def test_a_strategy_that_only_a_request_names(pair, engine, alone) -> None:
    assert "chain:1" not in engine.strategies
    deltas = run(engine, asked("named", PROMPTS[2], strategy="chain:1"))[0]
    assert tokens(deltas) == alone["plain"][2].tokens and {delta.strategy for delta in deltas[1:]} == {"chain:1"}
    assert run(engine, asked("again", PROMPTS[2], strategy="tree:2,2,4"))[0][1].strategy == TREE
    del engine.strategies["chain:1"]
    few = Engine(*pair, dataclasses.replace(SETTINGS, strategies=tuple(f"chain:{k}" for k in range(1, 15))))
    with pytest.raises(UserError, match="no more than 16 will be"):
        few.check(asked("many", PROMPTS[2], strategy="chain:20"))


def test_a_strategy_of_a_request_that_cannot_be_run_fails_with_it_alone(engine, alone, monkeypatch) -> None:
    def compiler(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 GiB\nmore of it")

    monkeypatch.setattr("eagle3_jax.speculate.round.verify", compiler)  # of what is not compiled yet
    requests = [asked(f"named {i}", PROMPTS[i], strategy="chain:2") for i in range(3)]
    *bad, good = run(engine, *requests, asked("neighbour", PROMPTS[4]))
    for deltas in bad:
        assert deltas[-1].finish_reason == "error" and "chain:2" in deltas[-1].error and "5 GiB" in deltas[-1].error
    assert tokens(good) == alone["plain"][4].tokens
    with pytest.raises(UserError, match="chain:2 .* cannot be run here: .*5 GiB.* this server has auto, plain"):
        engine.check(requests[0])
    assert engine.state == "ready" and "chain:2" not in engine.strategies and idle(engine)


def test_a_draft_that_is_not_finite_is_told_and_changes_no_text(engine, alone) -> None:
    broken = Engine(engine._target, not_a_number(engine._draft), SETTINGS)
    broken.start()
    deltas = run(broken, asked("NaN", PROMPTS[2]))[0]
    assert tokens(deltas) == alone["plain"][2].tokens and sum(accepted(deltas)) == 0
    assert [delta.finite for delta in deltas] == [True] + [False] * (NEW - 1)
    asyncio.run(broken.drain(5))
    assert all(delta.finite for delta in run(engine, asked("numbers", PROMPTS[2]))[0])


def test_rounds_are_timed_without_what_plain_rounds_left_the_draft_to_read(engine, monkeypatch) -> None:
    runner, read = engine._runner, []

    def compare_each(run, strategies, prepare):
        for strategy in (*strategies, *strategies):
            prepare()
            read.clear()
            run(strategy)
            assert not read
        return {}

    catch_up = runner._catch_up
    monkeypatch.setattr(runner, "_catch_up", lambda rows: (read.append(rows), catch_up(rows)))
    monkeypatch.setattr("eagle3_jax.serving.runner.compare_each", compare_each)
    monkeypatch.setattr("eagle3_jax.serving.runner.known_costs", lambda *given: given[-1](given[-2]))
    for size in (1, 2):
        runner._measure(size)


def test_auto_chooses_among_what_is_compiled(engine, alone) -> None:
    deltas = run(engine, asked("auto", PROMPTS[2], strategy="auto"))[0]
    assert tokens(deltas) == alone["plain"][2].tokens
    assert {delta.strategy for delta in deltas} <= set(STRATEGIES)


def test_auto_requests_that_end_early_pass_through_the_metrics(engine, caplog) -> None:
    observed = Observed(engine, Metrics(engine, "m"))
    with caplog.at_level("INFO"):
        late = asyncio.run(collect(observed, asked("late", PROMPTS[2], strategy="auto", deadline=0.0)))
        bad = asyncio.run(collect(observed, asked("bad", [POISON, *PROMPTS[4]], strategy="auto")))
    assert (late[-1].finish_reason, bad[-1].finish_reason) == ("deadline", "error")
    assert [record.facts["finish_reason"] for record in caplog.records] == ["deadline", "error"]


def test_samples_are_those_of_generate(engine, special) -> None:
    greedy, sampled = run(engine, asked("greedy", PROMPTS[3]), asked("sampled", PROMPTS[3], seed=3, **SAMPLED))
    assert tokens(sampled) == special[3].tokens != tokens(greedy)
    assert accepted(sampled) == special[3].accepted


# --- where it ends


@pytest.mark.parametrize("place", range(0, 9))
def test_a_stop_token_ends_the_answer_wherever_it_lies(engine, alone, place) -> None:
    whole = alone["plain"][6].tokens
    stop = whole[place]
    deltas = run(engine, asked(f"stop {place}", PROMPTS[6], stop_token_ids=(stop,)))[0]
    assert tokens(deltas) == whole[: whole.index(stop)] and deltas[-1].finish_reason == "stop"


def test_no_stop_before_the_least_number_of_tokens(engine, alone, special) -> None:
    stop = alone["plain"][6].tokens[2]
    deltas = run(engine, asked("least", PROMPTS[6], stop_token_ids=(stop,), min_tokens=9))[0]
    assert tokens(deltas) == [token for token in special[6].tokens if token != stop] and len(tokens(deltas)) >= 9


@pytest.mark.parametrize("new", (1, 2, 3, 5))
def test_the_most_tokens(engine, alone, new) -> None:
    deltas = run(engine, asked(f"most {new}", PROMPTS[5], new))[0]
    assert tokens(deltas) == alone["plain"][5].tokens[:new] and deltas[-1].finish_reason == "length"


def test_the_end_of_the_context(engine, alone) -> None:
    answer = alone["plain"][7].tokens
    deltas = run(engine, asked("context", PROMPTS[7] + answer[:20], 99))[0]
    assert tokens(deltas)[:4] == answer[20:] and len(tokens(deltas)) == SETTINGS.max_len - 80
    assert deltas[-1].finish_reason == "length"


# --- log probabilities, grammars, poison


def test_log_probabilities_are_the_targets_own(engine, pair) -> None:
    settings = {"logit_bias": {7: 3.0}, "logprobs": 4}
    deltas = run(engine, asked("scored", PROMPTS[4], **settings), asked("neighbour", PROMPTS[5]))[0]
    text = PROMPTS[4] + tokens(deltas)
    logits = pair[0].forward(np.asarray([text])).logits[0, len(PROMPTS[4]) - 1 : -1]
    expected = np.asarray(jax.nn.log_softmax(logits))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert len(entries) == NEW
    for row, token, entry in zip(expected, tokens(deltas), entries, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:4].tolist()
        assert [p for _, p in entry.top] == pytest.approx(np.sort(row)[::-1][:4].tolist(), abs=1e-4)


class Even:
    """Even tokens only; remembers what it was told. fails: at which call of `mask` or `advance` it raises."""

    def __init__(self, fails: int | None = None):
        self.seen, self.calls, self.fails = [], 0, fails

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self.fails:
            raise RuntimeError("no such state")

    def mask(self) -> np.ndarray:
        self._call()
        return np.arange(VOCAB) % 2 == 0

    def advance(self, token: int) -> None:
        self._call()
        self.seen.append(token)


def test_a_misspelt_strategy_is_refused_with_a_grammar_as_well(engine) -> None:
    with pytest.raises(UserError, match="not known"):
        engine.check(asked("a", [3], strategy="chian:3", grammar=Even()))


def test_a_grammar_sees_committed_tokens_only(engine, alone, special) -> None:
    grammar = Even()
    answer, neighbour = run(engine, asked("even", PROMPTS[2], grammar=grammar), asked("free", PROMPTS[3]))
    assert tokens(answer) == grammar.seen == special[2].tokens
    assert tokens(neighbour) == alone["plain"][3].tokens
    forbidden = special[2].tokens[0]
    both = run(engine, asked("both", PROMPTS[2], grammar=Even(), logit_bias={forbidden: -1e9}))[0]
    assert tokens(both) and not any(token % 2 or token == forbidden for token in tokens(both))


@pytest.mark.parametrize("fails", (1, 2, 5))
def test_a_grammar_that_fails_fails_alone(engine, alone, fails) -> None:
    broken, neighbour = run(engine, asked(f"bad {fails}", PROMPTS[2], grammar=Even(fails)), asked("well", PROMPTS[3]))
    assert broken[-1].finish_reason == "error" and "no such state" in broken[-1].error
    assert tokens(neighbour) == alone["plain"][3].tokens


def test_poison_stays_in_its_slot(engine, alone) -> None:
    for turn in range(2):
        poisoned = asked(f"poison {turn}", [POISON, *PROMPTS[4]])
        bad, *good = run(engine, poisoned, *(asked(f"{turn} {i}", PROMPTS[i]) for i in range(6)))
        assert bad[-1].finish_reason == "error" and "not finite" in bad[-1].error and not tokens(bad)
        assert [tokens(deltas) for deltas in good] == [r.tokens for r in alone["plain"][:6]]
    assert idle(engine)


# --- prefixes


def same(some: list[Delta], others: list[Delta]) -> bool:
    return tokens(some) == tokens(others) and accepted(some) == accepted(others)


@pytest.mark.parametrize("first", STRATEGIES)
def test_a_known_prefix_is_not_read_again(engine, forgetful, first) -> None:
    prompt = ids_of(50 + len(first), 30, vocab_size=VOCAB - 1).tolist()
    before = engine.stats().prefix_hits_total
    answer = tokens(run(engine, asked(f"{first} one", prompt, strategy=first))[0])
    assert engine.stats().prefix_hits_total - before < 5
    longer = prompt + answer + PROMPTS[1]
    expected = run(forgetful, asked("from the start", longer))[0]
    for turn in range(2):
        assert same(run(engine, asked(f"{first} two {turn}", longer))[0], expected)
    # Of the first answer at least all but what the last plain rounds left unread; of the longer prompt all but one.
    assert engine.stats().prefix_hits_total - before >= 30 + len(longer) - 2
    assert forgetful.stats().prefix_hits_total == 0 and sum(accepted(expected)) > 0


def test_a_burst_of_one_prompt_is_read_once(engine, forgetful) -> None:
    prompt = ids_of(60, 50, vocab_size=VOCAB - 1).tolist()
    expected = run(forgetful, asked("from the start", prompt))[0]
    before = engine.stats().prefix_hits_total
    for deltas in run(engine, *(asked(f"burst {i}", prompt) for i in range(4))):
        assert same(deltas, expected)
    assert engine.stats().prefix_hits_total - before >= 3 * (50 - 16)


def test_a_prefix_of_a_running_request_is_copied(engine, forgetful) -> None:
    shared = ids_of(70, 40, vocab_size=VOCAB - 1).tolist()
    prompts = [shared + PROMPTS[1], shared[:30] + PROMPTS[2]]
    expected = [run(forgetful, asked("from the start", prompt, 30))[0] for prompt in prompts]

    async def one_after_the_other() -> list[list[Delta]]:
        running = asyncio.create_task(collect(engine, asked("first of two", prompts[0], 30)))
        while not engine.stats().kv_tokens_used > 45:
            await asyncio.sleep(0.0001)
        return [await collect(engine, asked("second of two", prompts[1], 30)), await running]

    before = engine.stats().prefix_hits_total
    second, first = asyncio.run(one_after_the_other())
    assert same(first, expected[0]) and same(second, expected[1])
    assert engine.stats().prefix_hits_total - before >= 29


# --- coming and going


def test_cancelling_by_name(engine, alone) -> None:
    async def cancelled() -> list[Delta]:
        deltas = []
        async for delta in engine.stream(asked("named", PROMPTS[7], 30)):
            deltas.append(delta)
            engine.cancel("named")
        return deltas

    deltas = asyncio.run(cancelled())
    assert deltas[-1].finish_reason == "cancelled" and not deltas[-1].tokens
    engine.cancel("nobody")


def test_a_callers_loop_that_is_gone_harms_nobody(engine, alone) -> None:
    loop = asyncio.new_event_loop()
    stream = engine.stream(asked("gone", PROMPTS[7], 30))
    loop.run_until_complete(anext(stream))
    loop.close()
    assert tokens(run(engine, asked("still there", PROMPTS[3]))[0]) == alone["plain"][3].tokens
    assert idle(engine)
    asyncio.run(stream.aclose())


# --- what is refused


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (asked("a", PROMPTS[7] + PROMPTS[7][:28]), "88 tokens"),
        (asked("b", []), "empty"),
        (asked("c", [VOCAB]), "outside"),
        (asked("d", [3], temperature=-1.0), "temperature"),
        (
            asked("e", [3], strategy="tree:9x9x80"),
            "80 tokens wide / a slot here has room for 34.* this server has auto, plain, tree:2x2x4",
        ),
        (asked("h", [3], strategy="tree:1x50x3"), "50 tokens wide"),
        (asked("f", [3], strategy="tree:1"), "not known"),
        (asked("g", [3], logprobs=21), "logprobs is 21 / of at most 20"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(engine, request_, said) -> None:
    with pytest.raises(UserError, match=said):
        engine.check(request_)
    with pytest.raises(UserError, match=said):
        run(engine, request_)


def test_settings_that_cannot_be(pair) -> None:
    for changes, said in (
        ({"max_len": 129}, "context is 128"),
        ({"slots": 0}, "slots"),
        ({"strategy": "chains"}, "not known"),
        ({"strategy": "tree:2x65x80"}, "vocabulary has 64"),
    ):
        with pytest.raises(UserError, match=said):
            Engine(*pair, dataclasses.replace(SETTINGS, **changes))


def test_without_a_draft_all_is_plain(pair) -> None:
    engine = Engine(pair[0], None, SETTINGS)
    for strategy in (None, "auto", "plain"):
        engine.check(asked("a", [3], strategy=strategy))
        assert engine._strategies.of(asked("a", [3], strategy=strategy)) == "plain"
    assert list(engine.strategies) == ["plain"]
    with pytest.raises(UserError, match="chain:9 needs a draft"):
        engine.check(asked("a", [3], strategy="chain:9"))


@pytest.mark.parametrize("default", ["plain", "auto"])
def test_auto_is_plain_where_nothing_else_is_compiled(pair, default: str) -> None:
    engine = Engine(*pair, dataclasses.replace(SETTINGS, strategy=default, strategies=("plain",)))
    assert engine._strategies.of(asked("a", [3], strategy="auto")) == "plain"
    assert engine._strategies.of(asked("a", [3])) == "plain"


def test_full_queue_and_names_in_use(engine) -> None:
    """An engine of the same shapes that has not begun: everybody waits. Its draft's head is lent by the target."""
    draft = engine._draft.with_params({k: v for k, v in engine._draft.params.items() if k != "lm_head"})
    waiting = Engine(engine._target, draft, dataclasses.replace(SETTINGS, queue=1))
    assert waiting.stats().kv_bytes == engine.stats().kv_bytes

    async def fill() -> None:
        tasks = [asyncio.create_task(collect(waiting, asked(f"w{i}", [3]))) for i in range(SETTINGS.slots + 1)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            await collect(waiting, asked("one too many", [3]))
        assert full.value.retry_after >= 1
        tasks[0].cancel()
        await asyncio.sleep(0)

    asyncio.run(fill())
    with pytest.raises(UserError, match="in use"):
        waiting._live.pop("w1")
        run(waiting, asked("w2", [3]))


# --- the end


def test_draining_lets_the_running_finish_and_cancels_at_the_limit(engine, alone) -> None:
    other = Engine(engine._target, engine._draft, SETTINGS)

    async def drain() -> list[Delta]:
        task = asyncio.create_task(collect(other, asked("short", PROMPTS[1])))
        await asyncio.sleep(0)
        other.start()
        await other.drain(60)
        with pytest.raises(EngineStopped):
            await collect(other, asked("late", [3]))
        return await task

    assert tokens(asyncio.run(drain())) == alone["plain"][1].tokens
    assert other.state == "stopped"

    other = Engine(engine._target, engine._draft, SETTINGS)

    async def cut() -> list[Delta]:
        task = asyncio.create_task(collect(other, asked("cut", PROMPTS[7], 30)))
        await asyncio.sleep(0)
        other.start()
        await other.drain(0)
        return await task

    assert asyncio.run(cut())[-1].finish_reason == "cancelled"


def test_draining_does_not_wait_for_a_long_program(engine, monkeypatch) -> None:
    other, go_on = Engine(engine._target, engine._draft, SETTINGS), threading.Event()
    monkeypatch.setattr(other._runner, "warm_up", lambda: None)
    monkeypatch.setattr(other._runner, "read", lambda *_: go_on.wait(60))  # "compiles"
    monkeypatch.setattr("eagle3_jax.serving.engine._LAST_STEP", 0.1)

    async def drain() -> list[Delta]:
        task = asyncio.create_task(collect(other, asked("left", PROMPTS[1])))
        await asyncio.sleep(0)
        other.start()
        await asyncio.wait_for(other.drain(0.1), 5)
        return await asyncio.wait_for(task, 5)

    assert asyncio.run(drain())[-1].finish_reason == "cancelled" and other.state == "draining"
    go_on.set()
    other._thread.join(10)
    assert not other._thread.is_alive()


def test_a_dead_engine_is_seen(engine, monkeypatch) -> None:
    other = Engine(engine._target, engine._draft, SETTINGS)
    monkeypatch.setattr(other._runner, "warm_up", lambda: None)
    monkeypatch.setattr(other._runner, "round", lambda *_: 1 / 0)

    async def ask() -> list[list[Delta]]:
        tasks = [asyncio.create_task(collect(other, asked(f"dies {i}", PROMPTS[i]))) for i in range(5)]
        await asyncio.sleep(0)
        other.start()
        return await asyncio.gather(*tasks)

    for deltas in asyncio.run(ask()):
        assert deltas[-1].finish_reason == "error" and "ZeroDivisionError" in deltas[-1].error
    assert other.state == "dead" and "ZeroDivisionError" in other.error
    with pytest.raises(EngineStopped, match="ZeroDivisionError"):
        run(other, asked("afterwards", [3]))
    asyncio.run(other.drain(1))
    assert other.state == "dead"

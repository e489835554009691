"""A small load run against the whole server, in this process; and the load test's own judgement: it must see faults."""

import asyncio
import json
import time

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from bench import load
from bench.http_client import Address, metrics, request
from bench.tiny_pair import write_tiny_pair
from bench.workload import jobs, malformed
from tests.serving.running import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(address, engine) of a server of the tiny pair with one slot and room for five to wait."""
    import eagle3_jax as e3
    from eagle3_jax.serving.api.app import create_app
    from eagle3_jax.serving.api.service import Service
    from eagle3_jax.serving.engine import Engine
    from eagle3_jax.serving.requests import Settings

    folder, draft = write_tiny_pair(tmp_path_factory.mktemp("pair"))
    target = e3.load_target(folder, dtype="float32")
    engine = Engine(target, e3.load_draft(draft, target=target), Settings(1, 128, "chain:2", queue=5, chunk=16))
    try:
        engine.start()
        service = Service(engine, target.tokenizer, "tiny", target.config.vocab_size, target.eos_token_ids, 128)
        with serving(create_app(service)) as address:
            while engine.state == "warming":
                time.sleep(0.05)
            yield Address(int(address.rsplit(":", 1)[1])), engine
    finally:
        asyncio.run(engine.drain(5.0))


def test_a_small_load_gets_right_answers_and_leaves_nothing(server):
    address, _ = server

    async def go():
        pool = jobs(10, longest_prompt=60, longest_answer=12)
        expected = await load.alone(address, pool)
        before = await metrics(address)
        plan = load.Plan(40, rate=200.0, in_flight=5, abort=0.15, malformed=0.15)
        seen = await load.run(address, pool, ["auto", "chain:2"], plan, expected)
        return seen, before, await metrics(address)

    seen, before, after = asyncio.run(go())
    assert seen.faults == []
    outcomes = dict(seen.outcomes)
    assert outcomes["answered"] >= 20 and outcomes["refused"] >= 2 and outcomes["aborted"] >= 2
    assert sum(outcomes.values()) - outcomes.get("busy", 0) == 40
    row = load.row("mixed", seen)
    assert row["tau"] > 1.1 and row["tok_s"] > 0 and row["first_ms"]["50"] > 0
    names = [f"spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    drafts, drafted, accepted = (after[name] - before[name] for name in names)
    assert drafted == 2 * drafts > 0  # chain:2
    # Of answers that somebody waited for to the end, the client knows what was accepted; the others count as well.
    assert accepted >= sum(seen.accepted) > 0


def test_what_is_no_request_is_refused_one_by_one(server):
    async def go():
        return [await load.refused(server[0], path, body) for path, body in malformed()]

    assert asyncio.run(go()) == [None] * len(malformed())


def test_the_page_talks_to_the_real_server(server):
    async def go():
        async with request(server[0], "/") as reply:
            html = await reply.body()
        async with request(server[0], "/v1/models") as reply:
            return html, json.loads(await reply.body())

    html, listed = asyncio.run(go())
    assert b"page/page.js" in html and listed["data"][0]["eagle3"]["strategies"] == ["plain", "chain:2"]


def broken_server(answer: JSONResponse, held: int) -> Starlette:
    async def chat(request: Request) -> JSONResponse:
        return answer

    def state(request: Request) -> PlainTextResponse:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return PlainTextResponse("".join(f'eagle3:{name}{{engine="0"}} {held}\n' for name in names))

    paths = ("/v1/chat/completions", "/v1/completions")
    return Starlette(routes=[*(Route(path, chat, methods=["POST"]) for path in paths), Route("/metrics", state)])


@pytest.mark.parametrize(
    ("text", "status", "held", "complaint"),
    [
        ("right", 200, 0, None),
        ("wrong", 200, 0, "wrong answer"),
        ("right", 500, 0, "status 500"),
        ("right", 200, 3, "idle, but num_requests_running is 3"),
    ],
)
def test_the_load_test_sees_faults(text, status, held, complaint, monkeypatch):
    monkeypatch.setattr(load.kept, "__defaults__", (0.0,))
    job = next(job for job in jobs(8, 20, 4) if not job.body.get("stream") and not job.body.get("n"))
    choice = {"index": 0, "message": {"content": text}, "text": text, "finish_reason": "stop"}
    answer = JSONResponse({"choices": [choice], "usage": {"completion_tokens": 2}}, status)
    with serving(broken_server(answer, held)) as served:
        address = Address(int(served.rsplit(":", 1)[1]))
        expected = {job.number: (("right", "stop", 2),)}
        seen = asyncio.run(load.run(address, [job], ["plain"], load.Plan(3, 1000.0, 3), expected))
    assert bool(seen.faults) == bool(complaint) and all(complaint in fault for fault in seen.faults[:1])


def test_a_server_that_has_gone_is_a_fault():
    with serving(Starlette()) as served:
        address = Address(int(served.rsplit(":", 1)[1]))
    seen = asyncio.run(load.run(address, jobs(1, 8, 1), ["plain"], load.Plan(2, 1000.0, 2)))
    assert len(seen.faults) == 3 and "the server has gone" in seen.faults[-1]


def test_growing_memory_is_a_fault(monkeypatch):
    sizes = iter([100.0, 106.0])
    with serving(broken_server(JSONResponse({}, 400), 0)) as served:
        plan = load.Plan(4, 1000.0, 1, malformed=1.0)
        address = Address(int(served.rsplit(":", 1)[1]))
        seen = asyncio.run(load.run(address, jobs(1, 8, 1), ["plain"], plan, rss_mb=lambda: next(sizes)))
    assert seen.faults[-1] == "memory grew from 100 to 106 MB" and "was refused with b'{}'" in seen.faults[0]


@pytest.mark.parametrize("wrong", [["--abort", "0.9", "--malformed", "0.2"], ["--rate", "0"], ["--requests", "-3"]])
def test_bad_options_exit_2(wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        load.parse(wrong)
    assert stopped.value.code == 2 and "must be more than 0" in (said := capsys.readouterr().err) or "shares" in said

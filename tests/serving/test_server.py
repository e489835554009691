"""The process: a port in use, signals, a draining engine and a dead one. The signals themselves are uvicorn's."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
import time

import pytest

from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.app import create_app
from eagle3_jax.serving.api.server import Server, listen
from eagle3_jax.serving.requests import Delta
from tests.serving.fake_engine import HTTP, FakeEngine, blocks, ids, make_service, saying


class Slow(FakeEngine):
    """Drains as the real one: what runs ends by itself, or is cancelled at the limit."""

    def __init__(self, steps: int):
        super().__init__(self.steps)
        self.count, self.drained = steps, None

    def steps(self, request):
        for _ in range(self.count):
            if self.drained is not None and time.monotonic() > self.drained:
                yield Delta((), (), finish_reason="cancelled")
                return
            yield Delta((ids("a")[0],), (0,), 0)
            yield 0.02
        yield blocks(ids("z"))[0]

    async def drain(self, seconds):
        self.state, self.drained = "draining", time.monotonic() + seconds
        while self.left_running():
            await asyncio.sleep(0.01)
        self.state = "stopped"

    def left_running(self) -> bool:
        return any(thread.name == "client" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def cuts(monkeypatch):
    """After how many seconds, at the latest, processes would have been cut: this one is not."""
    seconds = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda after, exit: seconds.append(after))
    return seconds


@contextlib.contextmanager
def started(engine, drain_seconds=5.0):
    """(server, address, exit code when over) of a server in a thread."""
    listener = listen("127.0.0.1", 0)
    server = Server(create_app(make_service(engine)), engine, drain_seconds)
    code = []
    thread = threading.Thread(target=lambda: code.append(server.run_on(listener)))
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}", code
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def ask_in_thread(address):
    answers = []
    body = {"prompt": "a", "max_tokens": 3000, "stream": True}
    ask = lambda: answers.append(HTTP.post(f"{address}/v1/completions", json=body).text)  # noqa: E731
    thread = threading.Thread(target=ask, name="client")
    thread.start()
    return thread, answers


@pytest.mark.parametrize(("steps", "drain_seconds", "finishes"), [(20, 10.0, True), (2000, 0.2, False)])
def test_a_signal_lets_answers_finish_within_the_limit(steps, drain_seconds, finishes):
    engine = Slow(steps)
    with started(engine, drain_seconds) as (server, address, code):
        client, answers = ask_in_thread(address)
        while not engine.requests:
            time.sleep(0.01)
        server.handle_exit(signal.SIGTERM, None)
        while engine.state == "ready":
            time.sleep(0.01)
        health = HTTP.get(f"{address}/health")
        assert health.status_code == 503 and health.json()["status"] == "draining"
        assert HTTP.post(f"{address}/v1/completions", json={"prompt": "a"}).status_code == 503
        client.join(10)
    assert code == [0]
    assert ('"finish_reason":"stop"' in answers[0]) == finishes == ("shutting down" not in answers[0])
    assert answers[0].endswith("data: [DONE]\n\n")


def test_the_second_signal_ends_it_at_once(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    engine = FakeEngine(saying("a"))
    server = Server(create_app(make_service(engine)), engine, 5.0)
    server.handle_exit(signal.SIGINT, None)
    assert not codes
    server.handle_exit(signal.SIGINT, None)
    assert codes == [130]


def test_a_signal_while_programs_are_compiled_ends_it_without_waiting(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    engine = FakeEngine(saying("a"))
    engine.state = "warming"
    with started(engine) as (server, address, code):
        assert HTTP.get(f"{address}/health").status_code == 503
        server.handle_exit(signal.SIGTERM, None)
        limit = time.monotonic() + 10
        while not code and time.monotonic() < limit:
            time.sleep(0.05)
    assert codes == [0] and engine.state == "warming"


def test_a_signal_ends_the_process_whatever_the_engine_is_doing(monkeypatch, cuts):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    engine = FakeEngine(saying("a"))

    async def drain(seconds):
        engine.state = "draining"  # and it stays so: the engine's thread is in a program that does not end

    engine.drain = drain
    with started(engine, 0.1) as (server, _, code):
        server.handle_exit(signal.SIGTERM, None)
        limit = time.monotonic() + 10
        while not code and time.monotonic() < limit:
            time.sleep(0.05)
    assert codes == [0] and cuts == [0.1 + 10]


def test_a_dead_engine_is_seen_and_ends_the_server():
    engine = FakeEngine(saying("a"))
    with started(engine) as (_, address, code):
        assert HTTP.get(f"{address}/health").status_code == 200
        engine.state, engine.error = "dead", "the engine died: boom"
        health = HTTP.get(f"{address}/health")
        assert health.status_code == 503 and health.json() == {"status": "dead", "error": "the engine died: boom"}
        limit = time.monotonic() + 10
        while not code and time.monotonic() < limit:
            time.sleep(0.05)
        assert code == [1]


def test_an_address_that_cannot_be_had_is_one_line():
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port} / Address already in use / choose"):
        listen("127.0.0.1", port)
    taken.close()
    with pytest.raises(UserError, match="nowhere.invalid"):
        listen("nowhere.invalid", 0)

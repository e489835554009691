"""Answers from an OpenAI-compatible server: whole conversations, cut answers, faults, and going on where it stopped."""

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle3_jax.data import endpoint
from eagle3_jax.data.answers import AnswerCounts, AnswerSettings
from eagle3_jax.data.endpoint import answers_from_endpoint
from eagle3_jax.data.records import Conversation, TokenRow, read_records
from eagle3_jax.data.template import tokenise
from eagle3_jax.errors import UserError
from tests.cli.tiny_target import read_rows, tiny_tokenizer, write_prompts

PROMPTS = [["one"], ["two", "and then"], ["cut"], ["three"]]


class Server(ThreadingHTTPServer):
    """Answers with the last message backwards. `faults`: status codes to give first; `asked`: bodies of requests;
    `instead`: what is answered to all of them."""

    daemon_threads = True

    def __init__(self):
        self.faults, self.asked, self.instead = [], [], None
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._reply(200, {"data": [{"id": "the-target"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.faults:
            self._reply(self.server.faults.pop(0), {"error": "not\nnow"})
            return
        if self.server.instead is not None:
            self._reply(200, self.server.instead)
            return
        self.server.asked.append(body)
        text = body["messages"][-1]["content"]
        reason = "length" if text == "cut" else "stop"
        said = {"role": "assistant", "content": text[::-1]} | ({"reasoning": "hm"} if text == "three" else {})
        choice = {"message": said, "finish_reason": reason}
        self._reply(200, {"choices": [choice], "usage": {"completion_tokens": len(text)} if text == "one" else None})

    def _reply(self, status, content):
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(endpoint, "_PAUSE", 0.0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, tmp_path, progress=lambda counts: None, **settings) -> AnswerCounts:
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    out, options = tmp_path / "out.jsonl", AnswerSettings(**({"slots": 2} | settings))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{{ tail }}"
    return answers_from_endpoint(server.url, None, tokenizer, prompts, out, options, progress)


def test_conversations_and_a_cut_answer_become_rows_for_training(server, tmp_path) -> None:
    server.faults = [503, 429]  # tried again
    counts = ask(server, tmp_path, temperature=0.7, samples=2, template={"tail": "x"})
    assert (counts.prompts, counts.written, counts.too_long) == (8, 8, 0)
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == list(range(8))
    assert [m["content"] for m in rows[2]["conversations"]] == ["two", "owt", "and then", "neht dna"]
    assert rows[6]["conversations"][1] == {"role": "assistant", "content": "eerht", "reasoning": "hm"}
    records, tokenizer = read_records(tmp_path / "out.jsonl"), tiny_tokenizer()
    assert sum(isinstance(record, Conversation) for record in records) == 6
    ((ids, mask),) = tokenise(tokenizer, next(r for r in records if isinstance(r, TokenRow)), len(tokenizer))
    assert tokenizer.decode(ids[mask]) == "tuc"  # without an end-of-turn token, which the model has not written
    assert all(body["chat_template_kwargs"] == {"tail": "x"} for body in server.asked)
    seeds = [body["seed"] for body in server.asked]
    assert {body["model"] for body in server.asked} == {"the-target"} and sorted(set(seeds)) == list(range(8))


def test_stopped_and_continued(server, tmp_path) -> None:
    def stop(counts):
        if counts.written == 2:
            signal.raise_signal(signal.SIGINT)  # as the terminal sends it

    with pytest.raises(KeyboardInterrupt):
        ask(server, tmp_path, stop)
    before = len(server.asked)
    counts = ask(server, tmp_path, max_prompt=512)
    assert counts.already_there >= 2 and counts.already_there + counts.written == 4
    assert len(server.asked) - before < 5 and [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == [0, 1, 2, 3]
    with pytest.raises(UserError, match="temperature 0.0, now 0.5"):
        ask(server, tmp_path, temperature=0.5)


def test_faults_are_one_line(server, tmp_path) -> None:
    server.faults = [401]
    with pytest.raises(UserError, match="401 .*not.*now.*run again to go on") as caught:
        ask(server, tmp_path, slots=1)
    assert "\n" not in str(caught.value)
    server.faults = [500] * 4
    with pytest.raises(UserError, match="does not answer .500"):
        ask(server, tmp_path, slots=1)
    parts = {"finish_reason": "stop", "message": {"content": [{"type": "text"}]}}
    broken_off = {"finish_reason": "abort", "message": {"content": "on"}}
    choices = ([], ["a"], [parts], [broken_off])
    for server.instead in ({"error": "none"}, [], *({"choices": given} for given in choices)):
        with pytest.raises(UserError, match="not in OpenAI's form|is no text|broke an answer off .abort"):
            ask(server, tmp_path, slots=1)
    server.instead = None
    (tmp_path / "short").mkdir()
    assert ask(server, tmp_path / "short", max_prompt=3, slots=1).too_long == 4
    with pytest.raises(UserError, match="greedy answers are all the same"):
        AnswerSettings(samples=2)
    server.url = "http://127.0.0.1:9/v1"
    with pytest.raises(UserError, match="does not answer"):
        ask(server, tmp_path)

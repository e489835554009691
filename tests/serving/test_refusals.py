"""The API refuses: what is not supported or too large, without a key, and while the engine cannot answer."""

import contextlib
import json
import socket
import threading

import httpx2 as httpx
import openai
import pytest

from eagle3_jax.data.detokeniser import Vocabulary
from eagle3_jax.serving.requests import Delta, EngineStopped, QueueFull
from tests.serving.fake_engine import (
    HI,
    HTTP,
    TOKENIZER,
    VOCAB,
    byte_tokenizer,
    connect,
    fake_server,
    get,
    ids,
    post,
    refused,
    saying,
)

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "bogus": 1}, "bogus"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "guided_regex": "b"}, "guided_regex"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "0.5"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_p": 1.1}, "top_p"),
        ({"prompt": "a", "top_k": 1.5}, "top_k"),
        ({"prompt": "a", "min_p": 1}, "min_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 4096}, "prompt"),  # with the prompt one too many
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 33}, "stop"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens"),  # more than max_tokens
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "a", "logit_bias": {"01": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"100000": 1}}, "logit_bias"),
        ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "a", "eagle3": {"strategies": "plain"}}, "eagle3.strategies"),
        ({"prompt": "a", "eagle3": {"strategy": "chain:9"}}, "eagle3.strategy"),
        ({"prompt": "a", "repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"prompt": "a", "temperature": 1e39}, "temperature"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "alien", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages[0].weight"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": 0}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": 7}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": HI, "functions": []}, "functions"),
        ({"messages": HI, "modalities": ["audio"]}, "modalities.0"),
        ({"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template_kwargs": {"": 1}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"messages": HI, "chat_template_kwargs": {"chat_template": "{{ message }}"}}, "chat_template_kwargs"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(server, body, param):
    count = len(server[1].requests)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert len(refused(post(server, path, body), 400, param)) > 5
    assert len(server[1].requests) == count


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a":'
        + b"[" * 3000
        + b"]" * 3000
        + b"}}}}",
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_bodies_that_are_no_json_object(server, raw):
    refused(post(server, "/v1/completions", content=raw))


def test_a_template_that_refuses_messages_is_the_client_s_error():
    tokenizer = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with fake_server(saying("a"), tokenizer) as server:
        assert "alternate" in refused(post(server, "/v1/chat/completions", {"messages": HI}), 400, "messages")
    with fake_server(saying("a"), byte_tokenizer("{{ 8 // budget }}")) as server:
        body = {"messages": HI, "chat_template_kwargs": {"budget": 0}}
        assert "by zero" in refused(post(server, "/v1/chat/completions", body), 400, "messages")
    with fake_server(saying("a"), byte_tokenizer("")) as server:
        assert "no chat template" in refused(post(server, "/v1/chat/completions", {"messages": HI}))


def test_api_key():
    with fake_server(saying("a"), api_key="sécret") as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sécret".encode()}):
                refused(post(server, path, {"prompt": "a"}, headers=headers), 401)
        refused(get(server[0] + "/v1/models"), 401)
        refused(post(server, "/v1/completions", {"prompt": "a"}, headers={"Content-Type": "text/plain"}), 401)
        assert get(server[0] + "/health").status_code == 200
        good = {"Authorization": "bearer sécret".encode()}
        assert post(server, "/v1/completions", {"prompt": "a"}, headers=good).status_code == 200
        assert not [request for request in server[1].requests[1:]]


def test_body_limit():
    with fake_server(saying("a"), max_body=1000) as server:
        assert "1000" in refused(post(server, "/v1/completions", {"prompt": "a" * 1000}), 413)

        def unannounced():
            for _ in range(50):
                yield b"a" * 100

        with contextlib.suppress(httpx.TransportError):  # the server may close while the body is still being sent
            refused(post(server, "/v1/completions", content=unannounced()), 413)
        assert post(server, "/v1/completions", {"prompt": "a" * 900}).status_code == 200


def test_an_upload_that_breaks_off_is_no_error_of_ours(server, caplog):
    host, port = server[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        connection.sendall(head + b'{"prompt":')
    assert post(server, "/v1/completions", {"prompt": "a"}).status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_only_json_is_taken(server):
    """A page of another origin can send text or a form to any server, without asking; JSON it cannot."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonx"):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            said = refused(post(server, path, content=b'{"prompt": "a"}', headers={"Content-Type": kind}), 415)
            assert "application/json" in said
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        answer = post(server, "/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
        assert answer.status_code == 200


def test_a_text_that_cannot_fit_is_not_even_tokenised(server, monkeypatch):
    monkeypatch.setattr(type(TOKENIZER), "__call__", lambda *_, **__: pytest.fail("tokenised"))
    long = "a" * 10**6
    for path, body, param in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 20_000}, "messages"),
        ("/tokenize", {"prompt": long}, "prompt"),
        ("/tokenize", {"prompt": long, "add_special_tokens": False}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "name": long, "content": "a"}]}, "messages"),
        ("/detokenize", {"tokens": [5] * 4097}, "tokens"),
    ):
        assert "4096" in refused(post(server, path, body), 400, param)


def test_nothing_is_read_or_tokenised_on_the_event_loop(server, monkeypatch):
    """Which has the streams of all others to send."""
    threads = []

    def noted(function):
        return lambda *args, **more: (threads.append(threading.current_thread().name), function(*args, **more))[1]

    for place, name in (
        (type(TOKENIZER), "__call__"),
        (type(TOKENIZER), "apply_chat_template"),
        (json, "loads"),
        (Vocabulary, "bytes_of"),
    ):
        monkeypatch.setattr(place, name, noted(getattr(place, name)))
    for path, body in (("/v1/completions", {"prompt": [5], "echo": True}), ("/v1/chat/completions", {"messages": HI})):
        assert post(server, path, body | {"max_tokens": 1}).status_code == 200
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": HI}),
        ("/detokenize", {"tokens": [5]}),
    ):
        assert post(server, path, body).status_code == 200
    loop = [name for name in threads if not name.startswith("texts")]
    assert len(threads) > 10 and len(loop) <= 2 + 5, threads  # a token of each answer, and this test's own client


def test_more_choices_than_the_server_holds_are_refused():
    with fake_server(saying("a"), service={"most_requests": 4}) as server:
        assert "4 at most" in refused(post(server, "/v1/completions", {"prompt": ["a"] * 3, "n": 2}))
        assert post(server, "/v1/completions", {"prompt": ["a"] * 2, "n": 2}).status_code == 200


def test_cors_is_off_unless_asked_for(server):
    origin = {"Origin": "http://elsewhere"}
    assert "access-control-allow-origin" not in get(server[0] + "/health", headers=origin).headers
    with fake_server(saying("a"), cors_origins=["http://elsewhere"], api_key="k") as other:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        answer = HTTP.request("OPTIONS", other[0] + "/v1/completions", headers=origin | asked)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://elsewhere"
        assert "access-control-allow-origin" not in get(other[0] + "/health", headers={"Origin": "http://x"}).headers
        assert "retry-after" in get(other[0] + "/health", headers=origin).headers["access-control-expose-headers"]


FAILURES = {
    429: [QueueFull(2.2)],
    503: [EngineStopped("draining")],
    500: [RuntimeError("a secret path")],
    504: [Delta((5,), (0,)), Delta((), (), finish_reason="deadline")],
}


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_have_their_status(status, stream, caplog):
    with fake_server(lambda request: FAILURES[status]) as server:
        answer = post(server, "/v1/completions", {"prompt": "a", "n": 2, "stream": stream})
        if status == 504 and stream:  # too late for a status: an event
            assert answer.status_code == 200 and '"error"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
            with pytest.raises(openai.APIError, match="longer"):
                list(connect(server[0]).completions.create(model="tiny", prompt="a", stream=True))
            return
        message = refused(answer, status)
        assert "secret" not in message
        assert answer.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)


def test_a_request_that_fails_fails_alone(server):
    def script(request):
        if request.prompt[0] == ids("x")[0]:
            return [Delta((), (), finish_reason="error", error="NaN logits")]
        return saying("fine")(request)

    with fake_server(script) as server:
        bad = post(server, "/v1/completions", {"prompt": "x"})
        assert "NaN logits" in refused(bad, 500)
        assert post(server, "/v1/completions", {"prompt": "a"}).json()["choices"][0]["text"] == "fine"


def test_states_other_than_ready_are_503(server):
    with fake_server(saying("a")) as server:
        for state, error in (("warming", None), ("draining", None), ("dead", "out of memory")):
            server[1].state, server[1].error = state, error
            health = get(server[0] + "/health")
            assert health.status_code == 503 and health.json() == {"status": state, "error": error}
            message = refused(post(server, "/v1/completions", {"prompt": "a"}), 503)
            assert error is None or error in message
        assert not server[1].requests

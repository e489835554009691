"""The OpenAI API over an engine that plays scripts: with the real client, and with requests no client would send."""

import contextlib
import json
import socket
import threading
import time

import httpx2 as httpx
import openai
import pytest

from eagle3_jax.serving.requests import Delta, EngineStopped, QueueFull
from tests.serving.fake_engine import END, HTTP, TOKENIZER, VOCAB, byte_tokenizer, connect, fake_server, ids, saying

TEXT = "Hello wörld, the 🚀 end"
HI = [{"role": "user", "content": "hi"}]
SYSTEM = [{"role": "system", "content": "be brief"}]


@pytest.fixture(scope="module")
def server():
    with fake_server(saying(TEXT, 3, 1, 2)) as (address, engine):
        yield address, engine


@pytest.fixture(scope="module")
def client(server):
    return connect(server[0])


def get(address: str, **more) -> httpx.Response:
    return HTTP.get(address, **more)


def post(server, path: str, body=None, **more) -> httpx.Response:
    return HTTP.post(server[0] + path, **({"json": body} if body is not None else {}) | more)


def refused(answer: httpx.Response, status: int = 400, param: str | None = None) -> str:
    """The message of an error in OpenAI's shape, of this status and about this field."""
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert error.keys() == {"message", "type", "param", "code"} and answer.headers["x-request-id"]
    assert param is None or error["param"] == param, error
    return error["message"]


def test_chat(client, server):
    answer = client.chat.completions.create(model="tiny", messages=HI, seed=7)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    request = server[1].requests[-1]
    assert request.prompt == tuple(TOKENIZER.apply_chat_template(HI, add_generation_prompt=True)["input_ids"])
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert answer.usage.completion_tokens == len(ids(TEXT)) and answer.object == "chat.completion"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    params = request.params
    assert (params.temperature, params.top_p, params.seed, params.stop_token_ids) == (1.0, 1.0, 7, (END,))
    assert params.max_new_tokens == 4096 - len(request.prompt)
    assert not hasattr(answer, "eagle3")


@pytest.mark.parametrize("usage", [False, True])
def test_chat_stream(client, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True, **options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant" and "".join(delta.content or "" for delta in deltas) == TEXT
    assert not any("\ufffd" in (delta.content or "") for delta in deltas)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop" and not any(reasons[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    if usage:
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(ids(TEXT))
        assert all(chunk.usage is None for chunk in chunks[:-1])
    else:
        assert all(chunk.usage is None for chunk in chunks)


def test_stop_strings_end_everything_at_the_stop(client, server):
    def ask(**more):
        return client.chat.completions.create(model="tiny", messages=HI, stop=["ld, t", "zzz"], logprobs=True, **more)

    answer = ask().choices[0]
    assert (answer.message.content, answer.finish_reason) == ("Hello wör", "stop")
    assert "".join(entry.token for entry in answer.logprobs.content) == "Hello wör"
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "Hello wör"
    logprobs = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert logprobs == answer.logprobs.content and chunks[-1].usage.completion_tokens == len(logprobs)
    wait_for(lambda: len(server[1].left) >= 2)  # the rest was not generated


def test_legacy_completions_of_every_kind_of_prompt(client, server):
    for prompt, count in (("a the", 1), (["a", "b"], 2), (ids("a the"), 1), ([ids("a"), ids("b")], 2)):
        answer = client.completions.create(model="tiny", prompt=prompt, n=2, seed=5, max_tokens=30)
        assert [choice.text for choice in answer.choices] == [TEXT] * 2 * count
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        new = server[1].requests[-2 * count :]
        assert sorted(request.params.seed for request in new) == sorted([5, 6] * count)
        assert answer.usage.prompt_tokens == sum(len(request.prompt) for request in new) // 2
        assert answer.usage.completion_tokens == 2 * count * len(ids(TEXT))
    assert client.completions.create(model="tiny", prompt="a").usage.completion_tokens == 16


def test_legacy_logprobs_and_echo(client):
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=9, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert (
        logprobs.tokens == ["H", "e", "ll", "o", " ", "w", "ö", "r", "l"]
        and answer.choices[0].finish_reason == "length"
    )
    assert logprobs.text_offset == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    tokens = ids(TEXT)[:9]
    assert logprobs.token_logprobs == [-token / 100 for token in tokens]
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 9  # the chosen one is the likeliest here
    echoed = client.completions.create(model="tiny", prompt=["x ", "y "], echo=True, max_tokens=2)
    assert [choice.text for choice in echoed.choices] == ["x He", "y He"]
    chunks = client.completions.create(model="tiny", prompt="x ", echo=True, max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "x He"


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=3, max_completion_tokens=12
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 12 == answer.usage.completion_tokens
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in entries)


def test_n_choices_stream_side_by_side(client):
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(model="tiny", prompt="a", n=3, stream=True, max_tokens=30):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == dict.fromkeys(range(3), TEXT)


def test_settings_reach_the_engine(client, server):
    given = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": -1.0, "seed": -3}
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9]}
    bias = {"17": -100}
    extra["eagle3"] = {"strategy": "chain:2"}
    client.completions.create(model="tiny", prompt="a", max_tokens=7, logit_bias=bias, **given, extra_body=extra)
    request = server[1].requests[-1]
    assert {name: getattr(request.params, name) for name in given} == given
    for name in ("top_k", "min_p", "repetition_penalty", "min_tokens"):
        assert getattr(request.params, name) == extra[name]
    assert request.params.logit_bias == {17: -100} and request.params.stop_token_ids == (END, 9)
    assert request.params.max_new_tokens == 7 and request.strategy == "chain:2"
    client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True, "top_k": -1})
    assert server[1].requests[-1].params.stop_token_ids == () and server[1].requests[-1].params.top_k == 0


def test_temperatures(server):
    for given, used in ((0, 0), (0.0, 0.0), (1e-9, 1e-9), (None, 1.0), (2.5, 2.5)):
        assert post(server, "/v1/completions", {"prompt": "a", "temperature": given}).status_code == 200
        assert server[1].requests[-1].params.temperature == used
    assert post(server, "/v1/completions", {"prompt": "a"}).status_code == 200
    assert server[1].requests[-1].params.temperature == 1.0


def test_the_context_is_filled_to_the_last_token(server):
    def ask(prompt: int, **more) -> httpx.Response:
        return post(server, "/v1/completions", {"prompt": [ids("a")[0]] * prompt, **more})

    for prompt, asked, used in ((4080, {"max_tokens": 16}, 16), (4080, {}, 16), (4090, {}, 6), (4095, {}, 1)):
        assert ask(prompt, **asked).status_code == 200
        assert server[1].requests[-1].params.max_new_tokens == used
    for prompt, asked in ((4081, {"max_tokens": 16}), (4096, {}), (4097, {}), (4096, {"max_tokens": 1})):
        message = refused(ask(prompt, **asked))
        assert "4096" in message and str(prompt) in message


def test_stats(client, server):
    extra = {"eagle3": {"stats": True}}
    answer = client.chat.completions.create(model="tiny", messages=HI, extra_body=extra)
    assert answer.eagle3.keys() == {"strategy", "tau", "accepted", "tok_s", "acceptance_by_depth"}
    accepted = answer.eagle3["accepted"]
    assert answer.eagle3["tau"] == round(1 + sum(accepted) / len(accepted), 4) and accepted[:3] == [2, 0, 1]
    assert answer.eagle3["acceptance_by_depth"][0] == round(sum(a > 0 for a in accepted) / len(accepted), 4)
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = list(
            client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_body=extra, **options)
        )
        for chunk in chunks[1:]:
            if chunk.choices and chunk.choices[0].delta.content:
                assert "".join(text for text, _ in chunk.eagle3["pieces"]) == chunk.choices[0].delta.content
        assert chunks[-1].eagle3["accepted"] == accepted
        assert all("accepted" not in getattr(c, "eagle3", {}) or "pieces" in c.eagle3 for c in chunks[:-1])
    quiet = list(client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_body={"eagle3": {}}))
    assert not any(hasattr(chunk, "eagle3") for chunk in quiet[:-1]) and quiet[-1].eagle3["accepted"] == accepted


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
        ({"prompt": "a", "top_p": 0}, None),
        ({"prompt": "a", "top_p": 1.1}, None),
        ({"prompt": "a", "top_k": 1.5}, "top_k"),
        ({"prompt": "a", "min_p": 1}, None),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 4096}, None),  # with the prompt one too many
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 33}, "stop"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "stop_token_ids": [VOCAB]}, None),
        ({"prompt": "a", "min_tokens": 20}, None),  # more than max_tokens
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "a", "logit_bias": {"100000": 1}}, None),
        ({"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format"),
        ({"prompt": "a", "eagle3": {"strategies": "plain"}}, "eagle3.strategies"),
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
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": HI, "functions": []}, "functions"),
        ({"messages": HI, "modalities": ["audio"]}, "modalities.0"),
        ({"messages": HI, "parallel_tool_calls": False}, "parallel_tool_calls"),
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
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_bodies_that_are_no_json_object(server, raw):
    refused(post(server, "/v1/completions", content=raw))


def test_null_is_not_given_and_who_asks_changes_nothing(server):
    nothing = dict.fromkeys(["suffix", "best_of", "logit_bias", "stop", "n", "seed", "logprobs", "stream", "user"])
    answer = post(server, "/v1/completions", nothing | {"prompt": "a", "user": "me", "metadata": {"a": "b"}})
    assert answer.json()["choices"][0]["text"] == TEXT[:18]


def test_messages_of_all_kinds(server):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "日本"}], "name": "me"},
        {"role": "assistant", "content": "", "refusal": None, "audio": None, "annotations": [], "tool_calls": None},
        {"role": "user", "content": ""},
    ]
    same = [*SYSTEM, {"role": "user", "content": "one\n日本"}, {"role": "assistant", "content": ""}, messages[3]]
    assert post(server, "/v1/chat/completions", {"messages": messages}).status_code == 200
    assert server[1].requests[-1].prompt == tuple(
        TOKENIZER.apply_chat_template(same, add_generation_prompt=True)["input_ids"]
    )


def test_one_bos_whoever_writes_it():
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = byte_tokenizer(template, bos="<|start|>")
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|start|> $A", special_tokens=[("<|start|>", 0)])
    with fake_server(saying("a"), tokenizer) as server:
        for path, body in (
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/completions", {"prompt": "<|start|>hi"}),
        ):
            assert post(server, path, body).status_code == 200
            assert server[1].requests[-1].prompt == (0, *ids("hi"))
        assert post(server, "/tokenize", {"prompt": "hi"}).json()["tokens"] == [0, *ids("hi")]


def test_a_template_that_refuses_messages_is_the_client_s_error():
    tokenizer = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with fake_server(saying("a"), tokenizer) as server:
        assert "alternate" in refused(post(server, "/v1/chat/completions", {"messages": HI}))
    with fake_server(saying("a"), byte_tokenizer("")) as server:
        assert "no chat template" in refused(post(server, "/v1/chat/completions", {"messages": HI}))


def test_models_tokenize_health_and_paths(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 4096
    assert "tiny" in refused(post(server, "/v1/completions", {"prompt": "a", "model": "other"}), 404, "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    tokens = post(server, "/tokenize", {"prompt": "the 日"}).json()
    assert tokens["tokens"] == ids("the 日") and tokens["count"] == len(tokens["tokens"])
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "the 日"}
    chat = post(server, "/tokenize", {"messages": HI}).json()["tokens"]
    assert chat == TOKENIZER.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]
    refused(post(server, "/tokenize", {}))
    refused(post(server, "/detokenize", {"tokens": [VOCAB]}), param="tokens")
    health = get(server[0] + "/health")
    assert health.status_code == 200 and health.json() == {"status": "ready", "error": None}
    assert "eagle3:request_success_total" in get(server[0] + "/metrics").text
    refused(get(server[0] + "/nothing"), 404)
    refused(get(server[0] + "/v1/completions"), 405)


def test_request_ids(server):
    for given in ("abc-1", None, "a b", "x" * 200):
        headers = {} if given is None else {"x-request-id": given}
        answer = post(server, "/v1/completions", {"prompt": "a"}, headers=headers)
        returned = answer.headers["x-request-id"]
        assert returned == given if given == "abc-1" else len(returned) == 32
    engine_ids = [request.request_id for request in server[1].requests]
    assert len(set(engine_ids)) == len(engine_ids)


def test_api_key():
    with fake_server(saying("a"), api_key="sécret") as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sécret".encode()}):
                refused(post(server, path, {"prompt": "a"}, headers=headers), 401)
        refused(get(server[0] + "/v1/models"), 401)
        assert get(server[0] + "/health").status_code == 200
        good = {"Authorization": "Bearer sécret".encode()}
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
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"prompt":')
    assert post(server, "/v1/completions", {"prompt": "a"}).status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_a_text_that_cannot_fit_is_not_even_tokenised(server):
    long = "a" * 10**6
    chat = {"messages": [{"role": "user", "content": long}]}
    for path, body in (("/v1/completions", {"prompt": long}), ("/v1/chat/completions", chat)):
        assert "1000000 characters" in refused(post(server, path, body))


def test_more_choices_than_the_server_holds_are_refused():
    with fake_server(saying("a"), most_requests=4) as server:
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


def wait_for(condition) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def endless(request):
    while True:
        yield Delta((ids("a")[0],), (0,), 0, "chain:1")
        yield 0.01


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_requests(stream):
    with fake_server(endless) as (address, engine):
        for i in range(5):
            with pytest.raises(httpx.ReadTimeout):
                body = {"prompt": "a", "n": 2, "max_tokens": 4000, "stream": stream}
                with HTTP.stream("POST", address + "/v1/completions", json=body, timeout=0.3) as answer:
                    next(answer.iter_lines())
                    raise httpx.ReadTimeout("enough")
            wait_for(lambda i=i: len(engine.left) == 2 * (i + 1))


def test_clients_at_once_do_not_mix():
    def script(request):
        return [0.001, *saying(TOKENIZER.decode(request.prompt) * 3, 2, 1)(request)]

    with fake_server(script) as (address, _):
        answers = {}

        def ask(text: str, stream: bool) -> None:
            made = connect(address).completions.create(model="tiny", prompt=text, max_tokens=50, stream=stream)
            answers[text] = "".join(c.choices[0].text for c in made) if stream else made.choices[0].text

        texts = [f"text {i} " for i in range(8)]
        threads = [threading.Thread(target=ask, args=(text, i % 2 == 0)) for i, text in enumerate(texts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {text: text * 3 for text in texts}


def test_events_are_one_json_object_each(server):
    answer = post(server, "/v1/completions", {"prompt": "a", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])

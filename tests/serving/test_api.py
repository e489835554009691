"""The OpenAI API over an engine that plays scripts: what clients get, with the real one and by hand."""

import json
import threading
import time

import httpx2 as httpx
import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from eagle3_jax.data.template import prompt_ids
from eagle3_jax.serving.api import fields
from eagle3_jax.serving.requests import Delta
from tests.serving.fake_engine import (
    END,
    HI,
    HTTP,
    TEXT,
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

SYSTEM = [{"role": "system", "content": "be brief"}]


@pytest.fixture(scope="module")
def client(server):
    return connect(server[0])


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


def test_null_is_not_given_and_who_asks_changes_nothing(server):
    """Every field that OpenAI's client or ours knows, in objects within the body too."""
    required = {"prompt", "messages"}
    for path, kind, body in (
        ("completions", fields.CompletionBody, {"prompt": "a"}),
        ("chat/completions", fields.ChatBody, {"messages": HI, "max_tokens": 16}),
    ):
        openais = completion_create_params if path == "completions" else chat_create_params
        known = {*kind.model_fields, *openais.CompletionCreateParamsNonStreaming.__annotations__} - required
        nothing = dict.fromkeys({*known, *fields._UNSUPPORTED})
        answer = post(server, f"/v1/{path}", nothing | body | {"user": "me", "metadata": {"a": "b"}})
        assert answer.status_code == 200 and answer.json()["choices"], answer.text
    inner = {"stream": True, "stream_options": dict.fromkeys(["include_usage", "include_obfuscation"])}
    inner |= {"eagle3": {"strategy": None, "stats": None}, "response_format": {"type": "text", "json_schema": None}}
    inner["messages"] = [
        {"role": "user", "name": None, "weight": None, "content": [{"type": "text", "text": "a", "cache": None}]}
    ]
    inner |= {"tools": None, "tool_choice": None, "parallel_tool_calls": False}
    assert "[DONE]" in post(server, "/v1/chat/completions", inner).text
    assert post(server, "/tokenize", {"prompt": "a", "messages": None, "add_special_tokens": None}).status_code == 200


def test_variables_of_the_chat_template_are_those_of_training_unless_a_request_says_otherwise():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking != false %}<think>{% endif %}"
    tokenizer = byte_tokenizer(template)
    with fake_server(saying("a"), tokenizer, service={"template": {"enable_thinking": False}}) as server:
        for asked, text in ((None, "hi"), ({"enable_thinking": True}, "hi<think>"), ({"enable_thinking": None}, "hi")):
            body = {"messages": HI, "chat_template_kwargs": asked}
            assert post(server, "/v1/chat/completions", body).status_code == 200
            assert list(server[1].requests[-1].prompt) == ids(text)
            assert post(server, "/tokenize", body).json()["tokens"] == ids(text)
    assert prompt_ids(tokenizer, HI, template={"enable_thinking": False}) == ids("hi")  # as training renders it


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
    tools = [{"type": "function", "function": {"name": "f"}}]
    for mixed in ({"prompt": "a", "tools": tools}, {"prompt": "a", "chat_template_kwargs": {"a": 1}}):
        assert "does not go with prompt" in refused(post(server, "/tokenize", mixed))
    refused(post(server, "/tokenize", {"messages": HI, "add_special_tokens": True}), param="add_special_tokens")
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


def test_events_are_one_json_object_each():
    """Also for clients that end a line wherever Unicode does."""
    with fake_server(saying("a\u2028b\x85c")) as server:
        answer = post(server, "/v1/completions", {"prompt": "a", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a\u2028b\x85c"

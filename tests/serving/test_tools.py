"""Tool calls: however an answer's text is cut, the same calls and the same text come out of it."""

import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.serving.api.tools import tool_format
from tests.serving.fake_engine import TEMPLATE, TOKENIZER, blocks, byte_tokenizer, connect, fake_server, ids

ARGUMENTS = {"city": 'Z"ü</tool_call>{}', "days": [1, 2.5], "nested": {"a": None}}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>'
HERMES = TEMPLATE + "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
LLAMA = TEMPLATE + '{% if tools %}{"name": function name, "parameters": ..} {{ tools | tojson }}{% endif %}'
MISTRAL = TEMPLATE + "{% if tools %}[TOOL_CALLS]{{ tools | tojson }}{% endif %}"
QWEN_CODER = TEMPLATE + "{% if tools %}<tool_call><function=name>{{ tools | tojson }}{% endif %}"
BOTH = [("weather", ARGUMENTS), ("stop", {})]

# (template, answer) -> (text, calls)
ANSWERS = {
    "plain text": (HERMES, "just < text, {x}", "just < text, {x}", []),
    "one call": (HERMES, CALL, "", BOTH[:1]),
    "text, call, text": (HERMES, f"Well. \n{CALL}\n done ", "Well.done ", BOTH[:1]),
    "two calls": (HERMES, f'{CALL}\n<tool_call>{{"name": "stop", "arguments": "{{}}"}}</tool_call>', "", BOTH),
    "no closing tag": (HERMES, CALL.removesuffix("\n</tool_call>"), "", BOTH[:1]),
    "half a call": (HERMES, 'a <tool_call>{"name": "wea', 'a<tool_call>{"name": "wea', []),
    "broken, then good": (HERMES, f"<tool_call>{{bad}}</tool_call>{CALL}", "<tool_call>{bad}</tool_call>", BOTH[:1]),
    "no name": (HERMES, '<tool_call>{"n": 1}</tool_call>', '<tool_call>{"n": 1}</tool_call>', []),
    "half a character": (HERMES, CALL.replace("nested", "\\ud83d"), CALL.replace("nested", "\\ud83d"), []),
    "half a tag": (HERMES, "a <tool_", "a <tool_", []),
    "llama": (LLAMA, f'{{"name": "weather", "parameters": {WRITTEN}}}', "", BOTH[:1]),
    "llama, two": (LLAMA, f'{{"name": "weather", "parameters": {WRITTEN}}}; {{"name": "stop"}}', "", BOTH),
    "llama with its tag": (LLAMA, f'<|python_tag|>{{"name": "weather", "parameters": {WRITTEN}}}', "", BOTH[:1]),
    "llama, text": (LLAMA, " <|py and {}", " <|py and {}", []),
    "llama, other JSON": (LLAMA, '{"a": 1}', '{"a": 1}', []),
    "mistral": (MISTRAL, f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WRITTEN}}}, {{"name": "stop"}}]', "", BOTH),
    "mistral since v11": (MISTRAL, f"Yes. [TOOL_CALLS]weather[ARGS]{WRITTEN}[TOOL_CALLS]stop{{}}", "Yes.", BOTH),
    "mistral, broken": (MISTRAL, "[TOOL_CALLS] [{]", "[TOOL_CALLS] [{]", []),
    "mistral, text": (MISTRAL, "a [TOOL", "a [TOOL", []),
}


@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_any_cut_gives_the_same(name, sizes):
    template, answer, text, calls = ANSWERS[name]
    parser = tool_format(template).parser()
    content, found, start, i = "", [], 0, 0
    while start < len(answer):
        size = sizes[i % len(sizes)]
        more, new = parser.push(answer[start : start + size])
        content, found, start, i = content + more, found + new, start + size, i + 1
    rest, new = parser.finish()
    assert content + rest == text
    assert [(call.name, json.loads(call.arguments)) for call in found + new] == calls


def test_of_several_templates_the_one_for_tools_counts():
    assert tool_format({"default": TEMPLATE, "tool_use": HERMES}).name == "hermes"
    assert tool_format({"default": MISTRAL}).name == "mistral" and tool_format({"other": MISTRAL}) is None


def test_the_format_is_read_off_the_template():
    formats = [tool_format(template) for template in (HERMES, LLAMA, MISTRAL, QWEN_CODER, TEMPLATE, None)]
    assert [each and each.name for each in formats] == ["hermes", "llama3", "mistral", None, None, None]


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}]
TOOLS[0]["function"] |= {"strict": None}
TOOLS[0] |= {"cache": None}  # null is not given
ASK = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_calls_over_the_api(size):
    tokens = TOKENIZER(f"[TOOL_CALLS] {json.dumps([{'name': 'weather', 'arguments': ARGUMENTS}])}")["input_ids"]
    tokenizer = byte_tokenizer(MISTRAL)
    with fake_server(lambda request: blocks(tokens, (size,)), tokenizer) as (address, engine):
        client = connect(address)
        settings = {"model": "tiny", "messages": ASK, "tools": TOOLS, "tool_choice": "auto"}
        choice = client.chat.completions.create(**settings).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS
        assert len(call.id) == 9 and call.type == "function"
        assert '"weather"' in tokenizer.decode(engine.requests[0].prompt)
        with client.chat.completions.stream(**settings) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls" and not final.message.content
        assert json.loads(final.message.tool_calls[0].function.arguments) == ARGUMENTS
        many = client.chat.completions.create(**settings, parallel_tool_calls=True)  # as the model likes, as always
        assert many.choices[0].message.tool_calls
        with pytest.raises(openai.BadRequestError, match="parallel_tool_calls"):
            client.chat.completions.create(**settings, parallel_tool_calls=False)
        unasked = client.chat.completions.create(**settings | {"tool_choice": "none"})
        assert unasked.choices[0].message.content.startswith(" [{") and not unasked.choices[0].message.tool_calls
        assert '"weather"' not in tokenizer.decode(engine.requests[-1].prompt)


def test_a_conversation_with_calls_is_rendered():
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] }}({{ c['function']['arguments']['city'] }}){{ c['id'] }}{% endfor %}"
        "{{ m['tool_call_id'] }};{% endfor %}"
    )
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "sun"}]},
    ]
    tokenizer = byte_tokenizer(template)
    with fake_server(lambda request: blocks(ids("a")), tokenizer) as (address, engine):
        client = connect(address)
        client.chat.completions.create(model="tiny", messages=messages)
        assert tokenizer.decode(engine.requests[0].prompt) == "user:a;assistant:weather(Zürich)abc;tool:sunabc;"
        bad = json.loads(json.dumps(messages))
        for arguments in ("{", "[]", 3, '{"city": NaN}', '{"city": "\\ud83d"}'):
            bad[1]["tool_calls"][0]["function"]["arguments"] = arguments
            with pytest.raises(openai.BadRequestError, match="JSON object in a string"):
                client.chat.completions.create(model="tiny", messages=bad)


@pytest.mark.parametrize(
    "tools",
    [
        [{}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "f", "strict": True}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f", "colour": 1}}],
        [{"type": "retrieval", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": "f"}, "strict": True}],
    ],
)
def test_definitions_that_are_refused(tools):
    with fake_server(lambda request: blocks(ids("a")), byte_tokenizer(HERMES)) as (address, _):
        client = connect(address)
        with pytest.raises(openai.BadRequestError, match="tools"):
            client.chat.completions.create(model="tiny", messages=ASK, tools=tools)

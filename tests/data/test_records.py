"""Reading JSONL: what is accepted, and that every fault names file and line."""

import dataclasses
import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_jax.data.records import Conversation, TextRow, TokenRow, read_prompts, read_records
from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.messages import template_messages

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello\u2028there"}]


def write(folder: Path, *rows: object) -> Path:
    """Writes rows as JSON lines; strings and bytes go in as they are."""
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def _called(arguments: object) -> dict:
    """A row whose only answer is a tool call."""
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


def test_every_accepted_shape_is_read_in_order(tmp_path: Path) -> None:
    tokens = {"input_ids": [5, 6], "loss_mask": [0, 1], "id": "x"}
    path = write(tmp_path, {"conversations": CHAT, "source": "s"}, b"", {"messages": CHAT}, tokens)
    assert read_records(path) == [
        Conversation(CHAT, 1, str(path)),
        Conversation(CHAT, 3, str(path)),  # blank lines count as lines
        TokenRow([5, 6], [0, 1], 4, str(path)),
    ]


def test_null_keys_of_a_message_are_ignored_and_a_chat_needs_no_assistant(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "hi", "tool_calls": None}], "text": None})
    assert read_records(path)[0].messages == [{"role": "user", "content": "hi"}]


def test_messages_as_servers_write_them(tmp_path: Path) -> None:
    """Parts are joined as our server joins them; what is empty or blank says nothing; thoughts may have two names."""
    parts = [{"type": "text", "text": "2 + 2?"}, {"type": "text", "text": "Be brief."}]
    empty = {"refusal": None, "audio": None, "annotations": [], "function_call": None, "tool_calls": []}
    answer = {"role": "assistant", "content": "4", "reasoning_content": "", "reasoning": ""} | empty
    twice = {"role": "assistant", "content": "6", "reasoning_content": "hm", "reasoning": "hm"}
    question = {"role": "user", "content": parts}
    chat = read_records(write(tmp_path, {"messages": [question, answer, question, twice]}))[0].messages
    joined = {"role": "user", "content": "2 + 2?\nBe brief."}
    assert chat == [joined, {"role": "assistant", "content": "4"}, joined, twice]
    assert template_messages([question]) == [joined]


def test_sharegpt_system_tools_and_parts(tmp_path: Path) -> None:
    """Every form ends as messages that a chat template takes."""
    turns = [("system", "be kind"), ("human", "hi"), ("gpt", "hello"), ("observation", "4"), ("chatgpt", "four")]
    sharegpt = {"conversations": [{"from": role, "value": value} for role, value in turns]}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    parts = {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    called = {"messages": [parts, answer], "system": "be kind", "tools": json.dumps(tools), "source": "made up"}
    chat, tool_call = read_records(write(tmp_path, sharegpt, called))
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages == [{"role": r, "content": v} for r, (_, v) in zip(roles, turns, strict=True)]
    assert (chat.source, tool_call.source) == ("rows.jsonl", "made up") and tool_call.tools == tools
    assert tool_call.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 2}}}],
        },
    ]


def test_json_parquet_and_hub_rows_are_those_of_jsonl(tmp_path: Path, monkeypatch) -> None:
    rows = [{"messages": CHAT, "text": None, "source": "s"}, {"messages": None, "text": "hi", "source": None}]
    lines = read_records(write(tmp_path, *rows))
    assert lines[1] == TextRow("hi", 2, str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        if "absent" in names[0]:
            raise ConnectionError("no\nsuch dataset")
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    files = [str(tmp_path / name) for name in ("rows.json", "lines.json", "rows.parquet")]
    for file in [*files, "hf:org/name", "hf:org/name/config:test"]:
        found = read_records(file)
        assert [dataclasses.replace(record, path=lines[0].path) for record in found] == lines
    assert asked == [("org/name", "train"), ("org/name", "config", "test")]
    with pytest.raises(UserError, match="hf:org/absent: the hub did not give it .no such dataset"):
        read_records("hf:org/absent")


def test_what_a_table_has_for_other_rows_is_in_none_of_its_objects(tmp_path: Path) -> None:
    """Parquet fills up structs with nulls for keys that only other rows have. Its maps are objects."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = [_called(given) for given in ({"a": 1}, {"b": [{"c": 2}, {"d": 3}]})]
    parquet.write_table(pyarrow.Table.from_pylist(calls), tmp_path / "calls.parquet")
    found, expected = (read_records(file) for file in (tmp_path / "calls.parquet", write(tmp_path, *calls)))
    assert [record.messages for record in found] == [record.messages for record in expected]
    strings = pyarrow.map_(pyarrow.string(), pyarrow.string())
    kind = pyarrow.list_(pyarrow.struct({"name": pyarrow.string(), "parameters": strings}))
    tools = pyarrow.array([[{"name": "f", "parameters": [("a", "b")]}]], kind)
    parquet.write_table(pyarrow.table({"messages": [CHAT], "tools": tools}), tmp_path / "map.parquet")
    assert read_records(tmp_path / "map.parquet")[0].tools == [{"name": "f", "parameters": {"a": "b"}}]
    offsets, text = pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")
    not_utf8 = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, text])
    parquet.write_table(pyarrow.table({"text": not_utf8}), tmp_path / "broken.parquet")
    with pytest.raises(UserError, match="broken.parquet: not a whole Parquet file, or not one of text"):
        read_records(tmp_path / "broken.parquet")
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match="twice.parquet: the column text twice"):
        read_records(tmp_path / "twice.parquet")


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet"])
def test_torn_tables_are_one_line(tmp_path: Path, name: str) -> None:
    for content, words in ((b'[{"messages": [', "bad JSON|not a whole Parquet"), (b"", "is empty|not a whole")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=words) as caught:
            read_records(tmp_path / name)
        assert "\n" not in str(caught.value)
    if name == "rows.json":
        (tmp_path / name).write_text('[\n{"text": "a"},\n{"text": "b"}\n')
        with pytest.raises(UserError, match="rows.json: bad JSON .*line 4, column 1"):
            read_records(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"messages": [', "bad JSON"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        ([1, 2], "found a list"),
        ({"id": 1, "body": "hi"}, r"unknown shape of row \(keys id, body\); accepted: .*conversations.*input_ids"),
        ({"input_ids": [1]}, "unknown shape"),
        ({"messages": CHAT, "input_ids": [1], "loss_mask": [1]}, "more than one kind"),
        ({"messages": CHAT, "conversations": CHAT}, "more than one kind"),
        ({"messages": []}, "one or more messages"),
        ({"messages": [{"from": "human", "role": "user", "value": "hi"}]}, r'messages\[0\] needs "role" and "content"'),
        ({"messages": [{"from": "human", "text": "hi"}]}, "found keys from, text"),
        ({"messages": [{"from": "function_call", "value": "{}"}]}, "unknown role 'function_call'"),
        ({"messages": [{"role": "bot", "content": "hi"}]}, "unknown role 'bot'; accepted: system, developer, user"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "a part of type str; only text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type image_url; only text"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"found keys role, content \(content null\)"),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning": "a", "thinking": "b"}]}, "no one meaning"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls must be a list"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{"name": "f"}]}]}, "only an assistant"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0}]}, r"no one meaning \(weight\)"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}] * 2}]}, "2 parts, but a model"),
        ({"messages": CHAT, "tools": "add"}, "tools is a string but not JSON"),
        ({"messages": CHAT, "tools": [1]}, '"tools" must be a list of objects'),
        (b'{"messages": [{"role": "user", "content": "a"}], "messages": []}', "the key 'messages' twice"),
        pytest.param(b'{"text": "hi", "n": ' + b"1" * 5000 + b"}", "bad JSON .Exceeds", id="5000 digits"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "\\ud83d"}]}', "tools has half a surr"),
        (_called([1]), "arguments must be an object"),
        (_called('{"a": 1, "a": 2}'), "not JSON.*the key 'a' twice"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "first system message that differs"),
        ({"text": ["hi"]}, "text must be a string"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids but 1 loss_mask"),
        ({"input_ids": [], "loss_mask": []}, "one or more entries"),
        ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, r"input_ids\[1\] is 2.5"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, r"loss_mask\[1\] is 2"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, r"loss_mask\[1\] is 0.5"),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path, {"messages": CHAT}, row)
    with pytest.raises(UserError, match=f"rows.jsonl:2: .*{message}") as caught:
        read_records(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_records, read_prompts])
def test_missing_and_empty_files_are_errors(tmp_path: Path, read) -> None:
    with pytest.raises(UserError, match="none.jsonl: no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="rows.jsonl: the file is empty"):
        read(write(tmp_path, b"", b"  "))


def test_prompts_are_read_and_faults_named(tmp_path: Path) -> None:
    good = {"id": "a", "turns": ["one", "two"]}
    assert read_prompts(write(tmp_path, good, {"turns": ["x"]})) == [["one", "two"], ["x"]]
    for bad in ({"prompt": "x"}, {"turns": []}, {"turns": "x"}, {"turns": [1]}):
        with pytest.raises(UserError, match="rows.jsonl:2: .*string"):
            read_prompts(write(tmp_path, good, bad))


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="../shared/data is absent")
def test_shared_files_are_read() -> None:
    records = read_records(SHARED_DATA / "train" / "conversations.jsonl")
    assert len(records) == 220 and all(isinstance(record, Conversation) for record in records)
    prompts = read_prompts(SHARED_DATA / "eval" / "mt_bench.jsonl")
    assert len(prompts) == 80 and all(len(turns) == 2 for turns in prompts)


def test_gzipped_files_are_read_and_torn_ones_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b'{"input_ids": [1, 2], "loss_mask": [0, 1]}\n' * 50)
    file.write_bytes(whole)
    assert len(read_records(file)) == 50
    file.with_suffix("").write_bytes(b'\xef\xbb\xbf{"input_ids": [1, 2], "loss_mask": [0, 1]}\r\n')  # a byte order mark
    assert len(read_records(file.with_suffix(""))) == 1
    for broken in (whole[:-12], b"{}\n", whole[:30] + b"\x00\xff" * 20 + whole[30:]):
        file.write_bytes(broken)
        with pytest.raises(UserError, match="rows.jsonl.gz: not a whole gzip file"):
            read_records(file)

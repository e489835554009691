"""Reading JSONL: what is accepted, and that every fault names file and line."""

import gzip
import json
from pathlib import Path

import pytest

from eagle3_jax.data.records import Conversation, TokenRow, read_prompts, read_records
from eagle3_jax.errors import UserError

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello\u2028there"}]


def write(folder: Path, *rows: object) -> Path:
    """Writes rows as JSON lines; strings and bytes go in as they are."""
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def test_every_accepted_shape_is_read_in_order(tmp_path: Path) -> None:
    tokens = {"input_ids": [5, 6], "loss_mask": [0, 1], "id": "x"}
    path = write(tmp_path, {"conversations": CHAT, "source": "s"}, b"", {"messages": CHAT}, tokens)
    assert read_records(path) == [
        Conversation(CHAT, 1, str(path)),
        Conversation(CHAT, 3, str(path)),  # blank lines count as lines
        TokenRow([5, 6], [0, 1], 4, str(path)),
    ]


def test_null_keys_of_a_message_are_ignored_and_a_chat_needs_no_assistant(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "hi", "tool_calls": None}]})
    assert read_records(path)[0].messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"messages": [', "bad JSON"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        ([1, 2], "found a list"),
        ({"id": 1, "text": "hi"}, r"unknown shape of row \(keys id, text\); accepted: .*conversations.*input_ids"),
        ({"input_ids": [1]}, "unknown shape"),
        ({"messages": CHAT, "input_ids": [1], "loss_mask": [1]}, "more than one kind"),
        ({"messages": CHAT, "conversations": CHAT}, "more than one kind"),
        ({"messages": []}, "one or more messages"),
        ({"messages": [{"from": "human", "value": "hi"}]}, r'messages\[0\] needs "role" and "content"'),
        ({"messages": [{"role": "bot", "content": "hi"}]}, "unknown role 'bot'; accepted: system, user"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "must be a string, found list"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls"),
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
    for broken in (whole[:-12], b"{}\n", whole[:30] + b"\x00\xff" * 20 + whole[30:]):
        file.write_bytes(broken)
        with pytest.raises(UserError, match="rows.jsonl.gz: not a whole gzip file"):
            read_records(file)

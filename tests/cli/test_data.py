"""`eagle3 data generate`: counts, bad input, and going on after being stopped; `data preview`, `data inspect`."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from eagle3_jax.data import answers
from eagle3_jax.models.target import load_target
from tests.cli.tiny_target import read_rows, write_prompts
from tests.processes import environment
from tests.tiny import ids_of
from tests.torch_files import write_torch

FOREIGN = Path(__file__).parents[1] / "golden" / "foreign"

PROMPTS = [[word * n] for n in range(1, 7) for word in ("ab ", "what ")]


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture
def command(target, tmp_path, prompts) -> list[str]:
    options = ["--target", target, "--prompts", prompts, "--out", tmp_path / "out.jsonl", "--dtype", "float32"]
    return ["data", "generate", *map(str, options), "--max-new-tokens", "24", "--slots", "4"]


def test_answers_and_counts(eagle3, command, tmp_path):
    result = eagle3(*command, "--json", tmp_path / "counts.json", "--max-prompt", 42)
    assert result.code == 0 and result.out == ""
    rows, counts = read_rows(tmp_path / "out.jsonl"), json.loads((tmp_path / "counts.json").read_text())
    assert counts["prompts"] == len(PROMPTS) and counts["already_there"] == 0
    assert counts["written"] == len(rows) > 0 and counts["too_long"] == len(PROMPTS) - len(rows) > 0
    assert counts["tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert counts["tok_s"] == pytest.approx(counts["tokens"] / counts["seconds"])
    assert f"{len(rows)} answers written" in result.err


def test_a_limit_can_be_raised_later(eagle3, command, tmp_path):
    assert eagle3(*command, "--limit", 3).code == 0
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == [0, 1, 2]
    assert "3 were there" in eagle3(*command).err
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == list(range(len(PROMPTS)))


def test_bad_input_is_one_line(eagle3, command, target, tmp_path, prompts):
    out = tmp_path / "out.jsonl"
    base = ("data", "generate", "--target", target, "--out", out)
    assert "--self-prompt" in eagle3(*base).complaint
    assert "--self-prompt" in eagle3(*base, "--prompts", prompts, "--self-prompt", 3).complaint
    assert "no such file" in eagle3(*base, "--prompts", tmp_path / "nothing.jsonl").complaint
    empty = write_prompts(tmp_path / "empty.jsonl", [])
    assert "is empty" in eagle3(*base, "--prompts", empty).complaint
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"turns": ["a"]}\n{"turns": []}\n')
    assert "broken.jsonl:2" in eagle3(*base, "--prompts", broken).complaint
    assert "no such model" in eagle3("data", "generate", "--target", "no", "--out", out, "--prompts", prompts).complaint
    assert "--slots" in eagle3(*command, "--slots", 0).complaint
    assert "top_p" in eagle3(*command, "--top-p", 0).complaint
    assert "it needs 2 devices" in eagle3(*command, "--mesh", "tensor=2").complaint
    assert "our own engine" in eagle3(*command, "--mesh", "tensor=2", "--endpoint", "http://x/v1").complaint
    assert "context" in eagle3(*command, "--max-new-tokens", 256).complaint
    assert "cannot write" in eagle3(*command, "--out", prompts / "below_a_file.jsonl").complaint
    assert "did not begin" in eagle3(*command, "--out", prompts).complaint
    assert not out.exists()


def test_a_file_begun_with_other_settings_is_refused(eagle3, command, tmp_path, prompts):
    assert eagle3(*command, "--limit", 1).code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    assert "temperature 0.0, now 0.5" in eagle3(*command, "--temperature", 0.5).complaint
    write_prompts(prompts, PROMPTS[1:])
    assert "prompts" in eagle3(*command).complaint
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_self_prompts_are_written_once_and_answered(eagle3, target, tmp_path):
    out = tmp_path / "out.jsonl"
    command = ["data", "generate", "--target", target, "--out", out, "--dtype", "float32", "--slots", 4]
    command += ["--max-new-tokens", 24]
    assert eagle3(*command, "--self-prompt", 3).code == 0
    assert [row["id"] for row in read_rows(out)] == [0, 1, 2]
    prompts = tmp_path / "out.jsonl.prompts.jsonl"
    stamp = prompts.stat().st_mtime_ns
    assert "3 were there" in eagle3(*command, "--self-prompt", 3).err
    assert prompts.stat().st_mtime_ns == stamp
    assert "count 3, now 4" in eagle3(*command, "--self-prompt", 4).complaint


def test_an_interrupt_leaves_a_file_that_can_be_continued(eagle3, command, tmp_path, monkeypatch):
    append, written = answers.append_row, []

    def interrupted(out, row):
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append(row)
        append(out, row)

    monkeypatch.setattr(answers, "append_row", interrupted)
    result = eagle3(*command)
    assert result.code == 130 and result.out == ""
    assert result.err.count("\n") == 1 and "run the same command again" in result.err
    monkeypatch.undo()
    assert "5 were there" in eagle3(*command).err
    assert len(read_rows(tmp_path / "out.jsonl")) == len(PROMPTS)


@pytest.mark.slow
def test_killed_in_the_middle_the_same_rows_come_out(eagle3, command, target, tmp_path):
    prompts = write_prompts(tmp_path / "many.jsonl", [[f"{'abcdefgh'[i % 8]} {'what ' * (i % 5)}"] for i in range(60)])
    command = [*command, "--prompts", str(prompts), "--temperature", "0.8", "--max-new-tokens", "48"]
    assert eagle3(*command, "--out", tmp_path / "whole.jsonl").code == 0
    out = tmp_path / "out.jsonl"
    script = "import sys; from eagle3_jax.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", script, *command], env=environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while (not out.exists() or out.stat().st_size == 0) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL, "it had finished before it could be killed"
    assert 0 < out.read_bytes().count(b"\n") < 60
    assert eagle3(*command).code == 0
    assert read_rows(out) == read_rows(tmp_path / "whole.jsonl")


# ------------------------------------------------------------------------------------------------ preview, inspect


@pytest.fixture
def conversations(tmp_path) -> Path:
    chats = [[("user", "what is a"), ("assistant", "a is b")], [("user", "ab"), ("assistant", "c"), ("user", "d")]]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chats.jsonl"


def test_preview_brackets_what_is_supervised(eagle3, target, conversations, tmp_path):
    result = eagle3(
        "data", "preview", conversations, "--target", target, "--length", 128, "--json", tmp_path / "c.json"
    )
    assert result.code == 0, result.err
    assert "<|start|>user\nwhat is a<|end|>\n<|start|>assistant\n⟦a is b<|end|>⟧\n" in result.out
    assert "⟦c<|end|>⟧\n<|start|>user\nd<|end|>" in result.out
    assert result.out.count("⟦") == 2 and "row 0: 2 documents" in result.out and result.out.count("--- document") == 2
    counts = json.loads((tmp_path / "c.json").read_text())
    assert (counts["documents"], counts["rows"], counts["supervised_tokens"]) == (2, 1, 7 + 2)
    assert "9 of" in result.err and counts["tokens"] < 128
    short = eagle3("data", "preview", conversations, "--target", target, "--length", 24, "--rows", 9)
    assert "cut off" in short.out and "documents cut" in short.err
    preview = ("data", "preview", conversations, "--target", target, "--rows", 0)
    assert eagle3(*preview).out == ""
    assert "0 duplicates" in eagle3(*preview, "--last-turn-only", "--chat-template", "{message: no}").err
    assert "no variable tools" in eagle3(*preview, "--chat-template", "{tools: []}").complaint
    assert "no variable enable_thinking" in eagle3(*preview, "--chat-template", "{enable_thinking: no}").complaint
    assert "no mapping" in eagle3(*preview, "--chat-template", "x").complaint
    assert "no such file" in eagle3("data", "preview", tmp_path / "no.jsonl", "--target", target).complaint


def test_inspect_prints_and_writes_what_it_found(eagle3, target, tmp_path):
    file = FOREIGN / "speculators_v1.pt"
    result = eagle3("data", "inspect", file, "--json", tmp_path / "found.json")
    assert result.code == 0 and "speculators v1" in result.out and "hidden_states[3]" in result.out
    assert "7 tokens, 4 supervised; states are 4 wide" in result.out and "does not say" in result.out
    assert "--target" in result.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert [state["name"] for state in found["states"]] == [f"hidden_states[{i}]" for i in range(4)]
    assert all(state["rms"] > 0 and state["looks_like"] for state in found["states"]) and found["stored"] is None
    assert (
        "4 wide, the target 64" in eagle3("data", "inspect", file, "--target", target, "--dtype", "float32").complaint
    )
    assert "torch.nn.modules.linear.Linear" in eagle3("data", "inspect", FOREIGN / "module.pt").complaint
    assert "it is text" in eagle3("data", "inspect", __file__).complaint
    (tmp_path / "empty.pt").write_text("")
    assert "it is empty" in eagle3("data", "inspect", tmp_path / "empty.pt").complaint


def test_inspect_counts_what_is_in_other_data(eagle3, tmp_path):
    question, answer = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    rows = [{"messages": [question, answer] * 2}, {"messages": [question]}, {"text": "x"}]
    file = tmp_path / "a b.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"input_ids": [1], "loss_mask": [1]}]))
    result = eagle3("data", "inspect", file, "--json", tmp_path / "found.json")
    assert result.code == 0 and "2 conversations" in result.out and f"data preview '{file}'" in result.err
    assert json.loads((tmp_path / "found.json").read_text()) == {
        **{"rows": 4, "conversations": 2, "token_rows": 1, "text_rows": 1},
        **{"messages": 5, "answers": 2, "without_answers": 1},
    }
    file.write_text("")
    assert "the file is empty" in eagle3("data", "inspect", file).complaint
    assert "no folder" in eagle3("data", "inspect", file, "--json", tmp_path / "no" / "x.json").complaint


def test_inspect_with_the_target_says_what_to_write(eagle3, target, tmp_path):
    loaded = load_target(target, "float32")
    ids = ids_of(5, 1, 96, vocab_size=loaded.config.vocab_size)
    states = [np.asarray(array)[0] for array in loaded.forward(ids, taps=(1, 0, 2)).taps.arrays]
    file = write_torch(tmp_path / "a.pt", {"input_ids": ids[0], "loss_mask": ids[0] * 0, "hidden_states": states})
    result = eagle3("data", "inspect", file, "--target", target, "--dtype", "float32")
    assert result.code == 0 and "block 1 input" in result.out and "embedding" in result.out
    assert 'data.stored: {"ids": [1, 0, 2], "convention": "block-input", "last_hidden": "pre-norm"}' in result.out

"""Answers by the target: rows are what it generated, and a run that was stopped ends in the same rows."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from eagle3_jax import UserError, generate, load_target
from eagle3_jax.data import files
from eagle3_jax.data.answers import AnswerSettings, generate_answers
from eagle3_jax.data.template import prompt_ids
from eagle3_jax.files import held
from tests.cli.tiny_target import read_rows, write_prompts, write_tiny_target

PROMPTS = [["ab " * n] for n in range(1, 8)]
SETTINGS = {"greedy": AnswerSettings(max_new_tokens=24, slots=3)}
SETTINGS["sampled"] = AnswerSettings(max_new_tokens=24, slots=3, temperature=0.9, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_tiny_target(tmp_path_factory.mktemp("answers") / "target"), "float32")


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


def run(target, prompts: Path, out: Path, settings: AnswerSettings, **options):
    return generate_answers(target, prompts, out, settings, lambda counts: None, **options)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_are_what_generate_gives_alone(target, prompts, tmp_path, settings):
    run(target, prompts, tmp_path / "out.jsonl", settings)
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p}
    for row, (text,) in zip(read_rows(tmp_path / "out.jsonl"), PROMPTS, strict=True):
        prompt = prompt_ids(target.tokenizer, [{"role": "user", "content": text}])
        alone = generate(target, None, prompt, settings.max_new_tokens, seed=settings.seed + row["id"], **sampling)
        assert row["input_ids"] == prompt + alone.tokens
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(alone.tokens)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("torn", [1, 30])
def test_after_a_torn_line_the_rows_are_those_of_an_unbroken_run(target, prompts, tmp_path, settings, torn):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(target, prompts, whole, settings)
    run(target, prompts, out, settings)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4])[:-torn])
    counts = run(target, prompts, out, settings)
    assert (counts.already_there, counts.written) == (3, len(PROMPTS) - 3)
    assert read_rows(out) == read_rows(whole)


def test_a_second_run_writes_nothing(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    run(target, prompts, out, SETTINGS["greedy"])
    before = out.read_bytes()
    counts = run(target, prompts, out, SETTINGS["greedy"])
    assert (counts.already_there, counts.written, out.read_bytes()) == (len(PROMPTS), 0, before)
    with held(out), pytest.raises(UserError, match="another process is writing there"):
        run(target, prompts, out, SETTINGS["greedy"])


def test_prompts_are_rendered_with_the_variables_of_the_chat_template(target, prompts, tmp_path):
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template += "{{ tail }}"
    target, out = dataclasses.replace(target, tokenizer=tokenizer), tmp_path / "out.jsonl"
    settings = AnswerSettings(max_new_tokens=24, slots=3, template={"tail": "abc"})
    run(target, prompts, out, settings, limit=1)
    asked = prompt_ids(tokenizer, [{"role": "user", "content": PROMPTS[0][0]}], template=settings.template)
    (row,) = read_rows(out)
    assert row["input_ids"][: len(asked)] == asked and row["loss_mask"][: len(asked) + 1] == [0] * len(asked) + [1]
    with pytest.raises(UserError, match="the target's chat template has no variable no"):
        run(target, prompts, out, AnswerSettings(max_new_tokens=24, template={"no": 1}))
    with pytest.raises(UserError, match="template {'tail': 'abc'}, now None"):
        run(target, prompts, out, SETTINGS["greedy"])


def test_prompts_of_the_hub(target, tmp_path, monkeypatch):
    rows = [{"turns": turns} for turns in PROMPTS]
    monkeypatch.setattr(files, "_hub_rows", lambda name: enumerate(rows, start=1))
    out, hub = tmp_path / "out.jsonl", Path("hf:org/prompts")
    assert run(target, hub, out, SETTINGS["greedy"], limit=2).written == 2
    assert run(target, hub, out, SETTINGS["greedy"], limit=2).already_there == 2
    rows.pop()
    with pytest.raises(UserError, match="begun with other settings .prompts "):
        run(target, hub, out, SETTINGS["greedy"])


def test_slots_may_change_between_runs(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    run(target, prompts, out, SETTINGS["greedy"], limit=2)
    other = AnswerSettings(max_new_tokens=24, slots=8)
    assert run(target, prompts, out, other).already_there == 2


def test_a_removed_file_can_be_begun_anew_with_other_settings(target, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    run(target, prompts, out, SETTINGS["greedy"], limit=1)
    with pytest.raises(UserError, match=r"temperature 0\.0, now 0\.9"):
        run(target, prompts, out, SETTINGS["sampled"])
    out.unlink()
    assert run(target, prompts, out, SETTINGS["sampled"], limit=1).written == 1


@pytest.mark.parametrize("line", ["no json", '{"input_ids": [1]}', "[]"])
def test_a_spoilt_line_is_named(target, prompts, tmp_path, line):
    out = tmp_path / "out.jsonl"
    run(target, prompts, out, SETTINGS["greedy"], limit=1)
    out.write_text(out.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"out\.jsonl:2"):
        run(target, prompts, out, SETTINGS["greedy"])


class _Scripted:
    """Stands for `generate_many`: each request is answered with the next of the given texts."""

    def __init__(self, target, texts: list[str], end: bool = True):
        self.answers = [target.tokenizer(text)["input_ids"] + [1] * end for text in texts]
        self.prompts = []

    def __call__(self, target, requests, **_options):
        for request in requests:
            self.prompts.append(list(request.prompt))
            request.tokens += self.answers.pop(0)
            yield request


def test_later_turns_see_the_answers_and_all_answers_are_supervised(target, tmp_path, monkeypatch):
    scripted = _Scripted(target, ["good", "yes"])
    monkeypatch.setattr("eagle3_jax.data.answers.generate_many", scripted)
    out = tmp_path / "out.jsonl"
    run(target, write_prompts(tmp_path / "p.jsonl", [["how", "really"]]), out, SETTINGS["greedy"])
    (row,) = map(json.loads, out.read_text().splitlines())
    chat = "<|start|>user\nhow<|end|>\n<|start|>assistant\ngood<|end|>\n<|start|>user\nreally<|end|>\n"
    assert target.tokenizer.decode(scripted.prompts[1]) == chat + "<|start|>assistant\n"
    assert target.tokenizer.decode(row["input_ids"]) == chat + "<|start|>assistant\nyes<|end|>"
    supervised = [i for i, keep in zip(row["input_ids"], row["loss_mask"], strict=True) if keep]
    assert target.tokenizer.decode(supervised) == "good<|end|>yes<|end|>"


def test_a_cut_answer_ends_its_conversation(target, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_jax.data.answers.generate_many", _Scripted(target, ["never end"], end=False))
    out = tmp_path / "out.jsonl"
    counts = run(target, write_prompts(tmp_path / "p.jsonl", [["how", "really"]]), out, SETTINGS["greedy"])
    assert counts.written == 1 and target.tokenizer.decode(read_rows(out)[0]["input_ids"]).endswith("never end")


def test_a_second_prompt_that_is_too_long_keeps_the_first_answer(target, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_jax.data.answers.generate_many", _Scripted(target, ["good"]))
    prompts = write_prompts(tmp_path / "p.jsonl", [["x" * 60], ["how", "x" * 60]])
    out = tmp_path / "out.jsonl"
    counts = run(target, prompts, out, AnswerSettings(max_prompt=50, max_new_tokens=24))
    assert (counts.too_long, counts.written) == (1, 1)
    assert target.tokenizer.decode(read_rows(out)[0]["input_ids"]).endswith("good<|end|>")


def test_prompts_that_leave_no_room_in_the_context_are_too_long(target, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", [["x" * 200], ["x"]])
    counts = run(target, prompts, tmp_path / "out.jsonl", AnswerSettings(max_new_tokens=100))
    assert (counts.too_long, counts.written) == (1, 1)


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"max_prompt": 0}, {"temperature": -1.0}, {"top_p": 0.0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        AnswerSettings(**wrong)

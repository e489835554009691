"""`eagle3 generate`: what is printed, what the JSON holds, and bad input."""

import io
import json
import sys

import pytest

from eagle3_jax import generate, load_target, save_draft
from eagle3_jax.data.template import prompt_ids
from tests.tiny import random_draft


def test_streamed_text_is_the_generated_text_and_the_json_is_complete(eagle3, target, tmp_path):
    file = tmp_path / "result.json"
    result = eagle3("generate", "--target", target, "--dtype", "float32", "what", "--json", file)
    assert result.code == 0
    content = json.loads(file.read_text())
    assert set(content) == {"tokens", "text", "accepted", "drafts", "tau", "tok_s", "finish_reason", "strategy"}
    loaded = load_target(target, "float32")
    expected = generate(loaded, None, prompt_ids(loaded.tokenizer, [{"role": "user", "content": "what"}]))
    assert content["tokens"] == expected.tokens
    assert result.out == content["text"] + "\n"
    assert content["text"] == loaded.tokenizer.decode(expected.tokens, skip_special_tokens=True)
    assert (content["strategy"], content["tau"]) == ("plain", 1.0) and content["tok_s"] > 0
    assert result.err.count("\n") == 1 and f"{len(expected.tokens)} tokens" in result.err
    assert f"finished by {expected.finish_reason}" in result.err and "tok/s" in result.err


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    loaded = load_target(target, "float32")
    folder = tmp_path_factory.mktemp("draft") / "draft"
    save_draft(random_draft(loaded, taps=(0, 1, 2), d2t=range(0, loaded.config.vocab_size, 2)), folder)
    return folder


def test_a_draft_speculates_and_its_taps_are_told(eagle3, target, draft, tmp_path):
    file = tmp_path / "result.json"
    options = ("--target", target, "--dtype", "float32", "--max-new-tokens", 20, "--temperature", 1, "--seed", 7)
    plain = eagle3("generate", *options, "what")
    result = eagle3("generate", *options, "--draft", draft, "--json", file, "what")
    content = json.loads(file.read_text())
    assert result.out == plain.out == content["text"] + "\n"
    assert content["strategy"] == "chain:3" and {len(row) for row in content["drafts"]} == {3}
    assert content["tau"] == 1 + sum(content["accepted"]) / len(content["accepted"])
    assert "taps [embedding, block 1 input, tap 2 = last block output before the final norm]" in result.err
    assert "warning" not in result.err
    assert "taps" not in plain.err
    other = eagle3("generate", *options, "what", "--draft", draft, "--json", file, "--strategy", "plain")
    assert other.out == plain.out and json.loads(file.read_text())["strategy"] == "plain"


def test_a_draft_of_other_weights_is_warned_of_and_chats_are_those_of_its_training(
    eagle3, target, draft, tmp_path, monkeypatch
):
    rendered = []

    def noted(*args, template, **more):
        rendered.append(template)
        return prompt_ids(*args, template=template, **more)

    monkeypatch.setattr("eagle3_jax.data.template.prompt_ids", noted)
    config = json.loads((draft / "config.json").read_text())
    config["eagle3_jax"]["target"]["fingerprint"]["hash"] = "0" * 16
    config["eagle3_jax"]["target"]["fingerprint"]["sample"] = [1.0] * 48
    config["eagle3_jax"]["training"] = {"chat_template": {"enable_thinking": False}}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    (other / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
    options = ("--dtype", "float32", "--max-new-tokens", 20, "--temperature", 1, "--seed", 7)
    result = eagle3("generate", "--target", target, "--draft", other, "what", *options)
    assert result.code == 0 and "warning: the draft" in result.err and "other weights" in result.err
    assert rendered == [{"enable_thinking": False}]


def test_a_single_token_has_no_speed(eagle3, target, tmp_path):
    file = tmp_path / "result.json"
    result = eagle3("generate", "--target", target, "hello", "--max-new-tokens", 1, "--json", file)
    assert result.code == 0 and json.loads(file.read_text())["tok_s"] is None


def test_raw_leaves_the_chat_template_out(eagle3, target, tmp_path):
    file = tmp_path / "result.json"
    options = ("--target", target, "--dtype", "float32", "--json", file)
    eagle3("generate", "--raw", "hello", *options)
    loaded = load_target(target, "float32")
    expected = generate(loaded, None, loaded.tokenizer("hello")["input_ids"])
    assert json.loads(file.read_text())["tokens"] == expected.tokens


def test_a_dash_reads_stdin(eagle3, target, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    from_stdin = eagle3("generate", "--target", target, "--dtype", "float32", "-")
    assert from_stdin.out == eagle3("generate", "--target", target, "--dtype", "float32", "hello").out


@pytest.mark.parametrize("text", [b"", b" \n", b"\xff\xfe"])
def test_a_prompt_of_nothing_or_no_text_is_refused(eagle3, target, monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert "the prompt is" in eagle3("generate", "--target", target, "-").complaint


def test_bad_input_is_one_line(eagle3, target, tmp_path):
    assert "no such model / nowhere" in eagle3("generate", "--target", "nowhere", "hi").complaint
    assert "empty" in eagle3("generate", "--target", target, "").complaint
    assert "not UTF-8" in eagle3("generate", "--target", target, "a\udcff").complaint
    assert "needs a draft" in eagle3("generate", "--target", target, "hi", "--strategy", "chain:2").complaint
    assert "not known" in eagle3("generate", "--target", target, "hi", "--strategy", "tree").complaint
    assert "top_p" in eagle3("generate", "--target", target, "hi", "--top-p", "0").complaint
    for setting, value in (("min_p", 1.0), ("repetition_penalty", 0.0), ("min_tokens", 129)):
        flag = f"--{setting.replace('_', '-')}"
        assert f"{setting} {value}" in eagle3("generate", "--target", target, "hi", flag, value).complaint
    for setting in ("presence_penalty", "frequency_penalty"):
        flag = f"--{setting.replace('_', '-')}"
        assert f"{setting} nan" in eagle3("generate", "--target", target, "hi", flag, "nan").complaint
    assert "no such model" in eagle3("generate", "--target", target, "--draft", "nowhere", "hi").complaint
    nowhere = tmp_path / "no" / "result.json"
    assert "no folder" in eagle3("generate", "--target", target, "hi", "--json", nowhere).complaint


def test_a_target_without_a_template_points_to_raw(eagle3, target, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((target / name).read_bytes())
    assert "--raw" in eagle3("generate", "--target", bare, "hi").complaint
    assert eagle3("generate", "--target", bare, "hi", "--raw", "--max-new-tokens", 1).code == 0

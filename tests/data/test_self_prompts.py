"""Prompts by the target itself: where they begin, which are kept, and that they are written once."""

import json

import pytest

from eagle3_jax import UserError, load_target
from eagle3_jax.data import self_prompts
from eagle3_jax.data.records import read_prompts
from eagle3_jax.data.self_prompts import sample_prompts, usable_prompt, user_header_ids, write_self_prompts
from tests.cli.tiny_target import tiny_tokenizer, write_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_tiny_target(tmp_path_factory.mktemp("self_prompts") / "target"), "float32")


@pytest.fixture
def tokenizer():
    return tiny_tokenizer("abcdefghijklmnopqrstuvwxyz ?\nü[INST]")


def silent(_kept, _sampled):
    pass


def test_the_header_is_what_comes_before_the_message(tokenizer):
    assert tokenizer.decode(user_header_ids(tokenizer)) == "<|start|>user\n"


def test_a_blank_before_the_message_is_left_to_the_first_word(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}"
    assert tokenizer.decode(user_header_ids(tokenizer)) == "[INST]"


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }}<|end|>", "<|start|>"])
def test_a_template_without_a_header_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="--prompts"):
        user_header_ids(tokenizer)


def test_only_whole_plain_messages_are_usable(tokenizer):
    def usable(text: str, end=(1,)):
        return usable_prompt(tokenizer, [*tokenizer(text)["input_ids"], *end], (1,))

    assert usable(" how\n") == "how"
    assert usable("how", end=()) is None  # cut
    assert usable("ab") is None  # too short
    assert usable("?? ?") is None  # no letters
    assert usable("how<|start|>so") is None  # began another turn
    first_byte_of_two = tokenizer("ü")["input_ids"][0]
    assert usable("how", end=(first_byte_of_two, 1)) is None


def test_prompts_are_repeatable_different_and_independent_of_slots(target):
    first = sample_prompts(target, 6, seed=3, slots=8, progress=silent)
    assert first == sample_prompts(target, 6, seed=3, slots=3, progress=silent)
    assert len({text.casefold() for text in first}) == 6


def test_neighbouring_seeds_share_no_prompt(target):
    first = sample_prompts(target, 6, seed=3, slots=8, progress=silent)
    assert not set(first) & set(sample_prompts(target, 6, seed=4, slots=8, progress=silent))


def test_samples_differing_only_in_case_or_punctuation_count_once(target, monkeypatch):
    texts = iter(["how so?", "how so", "ho wso", "why so"] + ["how  so"] * 100)

    def scripted(_target, requests, *_settings):
        for request in requests:
            request.tokens += [*target.tokenizer(next(texts))["input_ids"], 1]
            yield request

    monkeypatch.setattr(self_prompts, "generate_many", scripted)
    assert sample_prompts(target, 2, seed=0, slots=4, progress=silent) == ["how so?", "why so"]
    seen = []
    with pytest.raises(UserError, match="only 1 of 3 prompts came out of 30 samples"):
        sample_prompts(target, 3, seed=0, slots=4, progress=lambda kept, sampled: seen.append((kept, sampled)))
    assert len(seen) == 30 and seen[-1][1] == 30 and max(kept for kept, _ in seen) <= 3


def test_a_written_file_is_used_again_and_checked(target, tmp_path, monkeypatch):
    out = tmp_path / "new" / "prompts.jsonl"
    write_self_prompts(target, 3, out, 0, 8, silent)
    assert len(read_prompts(out)) == 3 and all(len(turns) == 1 for turns in read_prompts(out))
    monkeypatch.setattr(self_prompts, "sample_prompts", lambda *_: pytest.fail("sampled again"))
    write_self_prompts(target, 3, out, 0, 8, silent)
    for count, seed in ((4, 0), (3, 1)):
        with pytest.raises(UserError, match="begun with other settings"):
            write_self_prompts(target, count, out, seed, 8, silent)
    facts = out.with_name("prompts.jsonl.facts.json")
    assert json.loads(facts.read_text())["target"] == target.fingerprint["hash"]
    assert not list(out.parent.glob("*.tmp"))


def test_a_place_that_cannot_be_written_is_one_line(target, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write prompts"):
        write_self_prompts(target, 1, tmp_path / "file" / "prompts.jsonl", 0, 8, silent)

"""Streamed text: whole characters only, and in sum exactly the decoded text."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3_jax.cli.detokeniser import Detokeniser, decode
from tests.cli.tiny_target import tiny_tokenizer

TEXT = "naïve 日本 👩‍🚀 end"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer(TEXT + "abc")


def stream(tokenizer, ids: list[int]) -> list[str]:
    detokeniser = Detokeniser(tokenizer)
    return [*map(detokeniser.push, ids), detokeniser.flush()]


def test_characters_of_several_tokens_are_held_back_until_whole(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) == len(TEXT.encode())  # one token a byte, so that most characters are cut
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == TEXT
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_special_tokens_are_left_out_and_do_not_stop_the_text(tokenizer):
    ids = tokenizer("ab")["input_ids"] + [1] + tokenizer("日c")["input_ids"] + [1]
    assert "".join(stream(tokenizer, ids)) == decode(tokenizer, ids) == "ab日c"


def test_bytes_that_never_become_a_character_come_out_at_the_end_and_in_the_middle(tokenizer):
    first, second, _ = tokenizer("日")["input_ids"]
    middle = [first, *tokenizer("a")["input_ids"]]
    assert "".join(stream(tokenizer, middle)) == decode(tokenizer, middle) == "\ufffda"
    pieces = stream(tokenizer, [*tokenizer("a")["input_ids"], first, second])
    assert pieces == ["a", "", "", "\ufffd"]


def test_blanks_that_only_the_start_of_a_text_loses_are_kept_between_words():
    vocabulary = {"▁one": 0, "▁two": 1, "s": 2, "<unk>": 3}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert stream(tokenizer, [0, 2, 1, 2]) == ["one", "s", " two", "s", ""]

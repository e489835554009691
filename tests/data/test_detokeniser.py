"""Streamed text: whole characters only, and in sum exactly the decoded text."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3_jax.data.detokeniser import Detokeniser, Vocabulary, text_of
from eagle3_jax.errors import UserError
from tests.cli.tiny_target import tiny_tokenizer

TEXT = "naïve 日本 👩‍🚀 end"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer(TEXT + "abc")


def stream(tokenizer, ids: list[int]) -> list[str]:
    detokeniser = Detokeniser(Vocabulary(tokenizer))
    return list(map(detokeniser.push, ids))


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_characters_of_several_tokens_are_held_back_until_whole(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) == len(TEXT.encode())  # one token a byte, so that most characters are cut
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == TEXT
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_special_tokens_are_left_out_and_do_not_stop_the_text(tokenizer):
    ids = tokenizer("ab")["input_ids"] + [1] + tokenizer("日c")["input_ids"] + [1]
    assert "".join(stream(tokenizer, ids)) == decode(tokenizer, ids) == "ab日c"


def test_bytes_that_never_become_a_character(tokenizer):
    first, second, _ = tokenizer("日")["input_ids"]
    middle = [first, *tokenizer("a")["input_ids"]]
    assert "".join(stream(tokenizer, middle)) == decode(tokenizer, middle) == "\ufffda"
    assert stream(tokenizer, [*tokenizer("a")["input_ids"], first, second]) == ["a", "", ""]


def sentencepiece(decoder, *more: str) -> PreTrainedTokenizerFast:
    names = ["▁one", "▁two", "s", "<unk>", *more]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_sentencepiece_keeps_the_blank_with_which_an_answer_begins():
    tokenizer = sentencepiece(decoders.Metaspace())
    assert stream(tokenizer, [0, 2, 1, 2]) == [" one", "s", " two", "s"]
    assert text_of(Vocabulary(tokenizer), [0, 2]).lstrip() == decode(tokenizer, [0, 2])


def test_bytes_of_sentencepiece_are_joined_to_characters():
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer = sentencepiece(decoders.Sequence(parts), *(f"<0x{byte:02X}>" for byte in "日".encode()))
    assert stream(tokenizer, [0, 4, 5, 6, 1]) == [" one", "", "", "日", " two"]
    assert "".join(stream(tokenizer, [0, 4, 5, 6, 1])).lstrip() == decode(tokenizer, [0, 4, 5, 6, 1])


def test_words_without_a_decoder_are_set_apart_by_blanks():
    tokenizer = sentencepiece(None)
    assert text_of(Vocabulary(tokenizer), [2, 3, 2]).lstrip() == decode(tokenizer, [2, 3, 2]) == "s <unk> s"


def test_other_decoders_are_refused():
    with pytest.raises(UserError, match="WordPiece"):
        Vocabulary(sentencepiece(decoders.WordPiece()))

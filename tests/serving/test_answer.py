"""Text from tokens: whatever the tokens and the blocks they come in, it is that of decoding everything at once."""

from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data.detokeniser import Detokeniser, Vocabulary, text_of
from eagle3_jax.serving.api.answer import Answer
from eagle3_jax.serving.api.logprobs import chat_logprobs, completion_logprobs
from eagle3_jax.serving.api.stops import StopStrings
from tests.serving.fake_engine import SPECIAL, TOKENIZER, VOCAB, blocks, ids

VOCABULARY = Vocabulary(TOKENIZER)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
TEXTS = st.text("aab the\nö🚀日", max_size=25)
STOPS = st.lists(st.text("ab hö🚀", min_size=1, max_size=4), max_size=3)


def whole(text: str) -> str:
    """Without the bytes of an unfinished character at the end, which `decode` shows as U+FFFD."""
    return text.rstrip("\ufffd")


def run(tokens, sizes=(1,), stops=(), min_tokens=0, logprobs=None, finish="length"):
    answer = Answer(VOCABULARY, stops, min_tokens)
    pieces = []
    for delta in blocks(tokens, sizes, finish, logprobs):
        pieces.append(answer.push(delta))
        if pieces[-1].finish_reason:
            break
    return answer, pieces


def cut(text: str, stops) -> str:
    """`text` up to the stop string that is completed first, the longest if several are."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))]
    return text


@given(TOKENS)
def test_text_is_that_of_the_tokenizer(tokens):
    detokeniser = Detokeniser(VOCABULARY)
    pieces = [detokeniser.push(token) for token in tokens]
    decoded = TOKENIZER.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert whole("".join(pieces)) == whole(decoded)


@given(TEXTS, STOPS, SIZES, st.integers(0, 4))
def test_any_blocks_give_the_same_answer(text, stops, sizes, min_tokens):
    tokens = ids(text)
    answer, pieces = run(tokens, sizes, stops, min_tokens)
    alone, single = run(tokens, (1,), stops, min_tokens)
    joined = "".join(piece.text for piece in pieces)
    assert joined == "".join(piece.text for piece in single)
    free = text_of(VOCABULARY, tokens[:min_tokens])  # in which no stop string is looked for
    assert joined == free + cut(text[len(free) :], stops)
    assert "\ufffd" not in joined
    assert answer.finish_reason == alone.finish_reason
    kept = [token for piece in pieces for token in piece.tokens]
    assert kept == [token for piece in single for token in piece.tokens]
    # Tokens end where the text ends: those kept are needed for it, and enough.
    assert [token.id for token in kept] == tokens[: len(kept)] and answer.token_count == len(kept)
    assert text_of(VOCABULARY, [token.id for token in kept]).startswith(joined)
    for piece in pieces:
        assert "".join(part for part, _ in piece.parts) == piece.text


@given(st.lists(TEXTS, max_size=6), STOPS)
def test_stop_strings_do_not_depend_on_how_text_is_cut(parts, stops):
    finder, found, stopped = StopStrings(stops), "", False
    for part in parts:
        certain, stopped = finder.push(part)
        found += certain
        if stopped:
            break
    text = "".join(parts)
    assert found + finder.flush() == cut(text, stops)
    assert stopped == any(stop in text for stop in stops)


def test_a_stop_across_tokens_and_blocks_ends_text_tokens_and_logprobs():
    tokens = ids("one\nStop two")
    for sizes in ((1,), (3,), (20,), (2, 5)):
        answer, pieces = run(tokens, sizes, ["\nStop"], logprobs=2)
        assert "".join(piece.text for piece in pieces) == "one" and answer.finish_reason == "stop"
        kept = [token for piece in pieces for token in piece.tokens]
        logprobs = chat_logprobs(VOCABULARY, kept)["content"]
        assert [entry["token"] for entry in logprobs] == ["o", "n", "e"] and answer.token_count == 3
        assert [entry["logprob"] for entry in logprobs] == [-token / 100 for token in tokens[:3]]


def test_min_tokens_come_before_any_stop_string():
    _, pieces = run(ids("aaaabaaab"), (3,), ["b"], min_tokens=6)
    assert "".join(piece.text for piece in pieces) == "aaaabaaa"


def test_bytes_of_a_character_that_never_ends_are_not_shown():
    answer, pieces = run([*ids("a"), *ids("日")[:2]])
    assert "".join(piece.text for piece in pieces) == "a" and answer.token_count == 3


def test_tokens_of_a_character_carry_their_bytes():
    tokens = ids("é🚀")
    _, pieces = run(tokens, logprobs=1)
    kept = [token for piece in pieces for token in piece.tokens]
    assert len(kept) == len(tokens)
    entries = chat_logprobs(VOCABULARY, kept)["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é🚀"
    assert entries[0]["token"] == "bytes:\\xc3"
    listed = completion_logprobs(VOCABULARY, kept)
    assert listed["text_offset"] == [0, 0, *[1] * (len(tokens) - 2)]
    assert all(own in top for own, top in zip(listed["tokens"], listed["top_logprobs"], strict=True))


def test_special_tokens_are_shown_only_where_asked():
    token = SPECIAL.index("[TOOL_CALLS]")
    for shown, text in (((), "ab"), ((token,), "a[TOOL_CALLS]b")):
        answer = Answer(VOCABULARY, shown=shown)
        assert "".join(answer.push(delta).text for delta in blocks([*ids("a"), token, *ids("b")])) == text

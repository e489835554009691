"""Text from tokens as they come, never with half a character.

A tokenizer's decoder maps every token to bytes of its own and joins them, so the text of a sequence is its bytes in
UTF-8. (transformers' `decode` also drops the blank at the very start of a SentencePiece text; an answer goes on from
its prompt, so that blank belongs to it.)
"""

import codecs
import json
import re
from collections.abc import Collection
from typing import Any

from eagle3_jax.data.rendering import special_ids
from eagle3_jax.errors import UserError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """The bytes of each token of a fast transformers tokenizer: byte-level BPE, SentencePiece, or whole words without a
    decoder, which are then set apart by blanks. UserError for any other."""

    def __init__(self, tokenizer: Any):
        if not tokenizer.is_fast:
            raise UserError("the tokenizer is a slow one, whose bytes are not known / add its tokenizer.json")
        self.special = frozenset(special_ids(tokenizer))
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes] = {}
        kinds = _decoder_kinds(tokenizer)
        if "ByteLevel" in kinds:
            self._to_bytes = _byte_level(_byte_letters())
        elif kinds & {"ByteFallback", "Metaspace", "Replace"} and not kinds & {"WordPiece", "BPEDecoder", "CTC"}:
            self._to_bytes = _sentencepiece
        elif not kinds:
            self._to_bytes = lambda name: f" {name}".encode()
        else:
            found = ", ".join(sorted(kinds))
            raise UserError(f"tokenizer decoder {found} is not supported / use a byte-level BPE or SentencePiece one")

    def bytes_of(self, token: int) -> bytes:
        """What the token stands for, special tokens by their name; empty for an id without a token."""
        if token not in self._known:
            if token in self._added:
                self._known[token] = self._added[token].encode()
            else:
                name = self._tokenizer.convert_ids_to_tokens(token)
                self._known[token] = b"" if name is None else self._to_bytes(name)
        return self._known[token]


class Detokeniser:
    """`push` each token and print what it returns: together this is the text of all tokens.

    Special tokens are left out, except those in `shown`. Bytes of a character that is never finished are never
    printed if the text ends with them; in the middle they give U+FFFD, as everywhere.
    """

    def __init__(self, vocabulary: Vocabulary, shown: Collection[int] = ()):
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special.difference(shown)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that has become certain with this token; empty while a character is incomplete."""
        return "" if token in self._hidden else self._characters.decode(self._vocabulary.bytes_of(token))


def text_of(vocabulary: Vocabulary, ids: Collection[int]) -> str:
    """The text of a whole answer."""
    return "".join(map(Detokeniser(vocabulary).push, ids))


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """Names of all decoders that the tokenizer's decoder consists of."""
    decoder = tokenizer.backend_tokenizer.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return {part["type"] for part in [state, *state.get("decoders", [])] if part} - {"Sequence"}


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: the letter that stands for each byte, printable ones for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(letters: dict[str, int]):
    def to_bytes(name: str) -> bytes:
        # A token with any other letter was added as plain text.
        return bytes(map(letters.__getitem__, name)) if letters.keys() >= set(name) else name.encode()

    return to_bytes


def _sentencepiece(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()

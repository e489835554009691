"""Text from tokens as they come, never with half a character."""

from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoding puts for the bytes of a character that is not whole yet


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Text of `ids` as generated: special tokens left out, blanks untouched."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Detokeniser:
    """`push` each token, print what it returns, then print `flush()`: together this is `decode` of all tokens.

    Only a window is decoded: the tokens printed last and those held back. The former are there since the text of a
    token can depend on the one before (a blank at the very start of a text is dropped by some tokenizers).
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.window: list[int] = []
        self.printed = 0  # leading tokens of the window whose text is out

    def push(self, token: int) -> str:
        """The text that has become certain with this token; empty while a character is incomplete."""
        self.window.append(token)
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self.window, self.printed = self.window[self.printed :], len(self.window) - self.printed
        return text

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        text = self._new_text()
        self.printed = len(self.window)
        return text

    def _new_text(self) -> str:
        before = decode(self.tokenizer, self.window[: self.printed])
        return decode(self.tokenizer, self.window)[len(before) :]

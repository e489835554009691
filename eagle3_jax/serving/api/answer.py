"""One answer as it grows: Deltas in, text out, with its tokens and where each character came from.

Text, tokens, log probabilities and usage end at the same place: an answer's tokens are those with at least one
character before the stop string (all, if there is none).
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from eagle3_jax.data.detokeniser import Detokeniser, Vocabulary
from eagle3_jax.serving.api.stops import StopStrings
from eagle3_jax.serving.requests import Delta, TokenLogprobs

ENDED = ("stop", "length")  # finish reasons of an answer; the others are failures


@dataclass(frozen=True)
class AnswerToken:
    """offset: of its first character in the answer's text."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass
class Piece:
    """What a Delta added to an answer. parts: the text by token, with each token's depth; together they are `text`.
    accepted, strategy: of the round. finish_reason: of the last piece."""

    text: str = ""
    parts: list[tuple[str, int]] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)
    accepted: int | None = None
    strategy: str = "plain"
    finish_reason: str | None = None


class Answer:
    """stops: stop strings, not looked for in the text of the first `min_tokens` tokens. shown: special tokens that are
    part of the text."""

    def __init__(
        self, vocabulary: Vocabulary, stops: Collection[str] = (), min_tokens: int = 0, shown: Collection[int] = ()
    ):
        self._detokeniser = Detokeniser(vocabulary, shown)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._received = 0  # tokens
        self._decoded = self._released = 0  # characters
        self._waiting: deque[AnswerToken] = deque()  # tokens of which no character is released
        self._texts: deque[tuple[str, int]] = deque()  # text by token that is not released
        self.token_count = 0  # tokens of the answer so far
        self.finish_reason: str | None = None

    def push(self, delta: Delta) -> Piece:
        """What is certain after this Delta; nothing more comes after a piece with a finish_reason."""
        piece = Piece(accepted=delta.accepted, strategy=delta.strategy)
        logprobs = delta.logprobs or (None,) * len(delta.tokens)
        for token, depth, logprob in zip(delta.tokens, delta.depths, logprobs, strict=True):
            if self._token(piece, token, depth, logprob):
                self.finish_reason = piece.finish_reason = "stop"
                return piece
        if delta.finish_reason is not None:
            self._release(piece, self._stops.flush())
            self._take(piece, self._waiting)
            self._waiting = deque()
            self.finish_reason = piece.finish_reason = delta.finish_reason
        return piece

    def _token(self, piece: Piece, token: int, depth: int, logprobs: TokenLogprobs | None) -> bool:
        """Takes one token; True if its text completes a stop string."""
        text = self._detokeniser.push(token)
        self._received += 1
        self._waiting.append(AnswerToken(token, self._decoded, logprobs))
        self._texts.append((text, depth))
        self._decoded += len(text)
        certain, stopped = (text, False) if self._received <= self._min_tokens else self._stops.push(text)
        self._release(piece, certain)
        return stopped

    def _release(self, piece: Piece, text: str) -> None:
        """Moves `text` into the piece, with its parts and the tokens that begin in it."""
        self._released += len(text)
        piece.text += text
        left = len(text)
        while left:
            part, depth = self._texts.popleft()
            if part[left:]:
                self._texts.appendleft((part[left:], depth))
            if part:
                piece.parts.append((part[:left], depth))
            left -= len(part[:left])
        begun = [token for token in self._waiting if token.offset < self._released]
        self._take(piece, begun)
        for _ in begun:
            self._waiting.popleft()

    def _take(self, piece: Piece, tokens: Collection[AnswerToken]) -> None:
        piece.tokens += tokens
        self.token_count += len(tokens)

"""The `eagle3` object of an answer: how its tokens came."""

import time
from collections import Counter
from typing import Any

from eagle3_jax.serving.api.answer import Piece
from eagle3_jax.speculate.acceptance import acceptance_by_depth, tau
from eagle3_jax.speculate.strategy import parse_strategy


class Stats:
    """Of all choices of one answer. tok_s: tokens after each choice's first Delta, over the time since the first."""

    def __init__(self):
        self._accepted: list[int] = []
        self._strategies: Counter[str] = Counter()
        self._tokens = 0
        self._started: set[int] = set()
        self._first = self._last = 0.0

    def take(self, choice: int, piece: Piece, tokens: int) -> None:
        """tokens: how many the engine brought."""
        self._last = time.monotonic()
        self._first = self._first or self._last
        if choice in self._started:
            self._tokens += tokens
        self._started.add(choice)
        if piece.accepted is not None:
            self._accepted.append(piece.accepted)
            self._strategies[piece.strategy] += 1

    def body(self) -> dict[str, Any]:
        """strategy: the most used one. accepted: of each round, before cutting."""
        rounds = len(self._accepted)
        strategy = self._strategies.most_common(1)[0][0] if rounds else "plain"
        depth = max((parse_strategy(name).depth for name in self._strategies), default=0)
        seconds = self._last - self._first
        return {
            "strategy": strategy,
            "tau": round(tau(sum(self._accepted), rounds), 4),
            "accepted": self._accepted,
            "tok_s": round(self._tokens / seconds, 2) if seconds > 0 else None,
            "acceptance_by_depth": acceptance_by_depth(self._accepted, depth),
        }


def piece_stats(piece: Piece) -> dict[str, Any]:
    """Of one streamed piece: its text by token with depth (0 = the target's own)."""
    parts = [[text, depth] for text, depth in piece.parts]
    return {"pieces": parts, "accepted": piece.accepted, "strategy": piece.strategy}

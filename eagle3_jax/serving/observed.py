"""An engine's stream as it passes: each Delta and each end goes to the metrics, each end to the log as well.

    async for delta in observed.stream(request): ...

is `engine.stream(request)`, counted. Prompts and answers are never logged. A draft whose
logits are not finite is counted each time and told once: it costs acceptance and nothing else.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from eagle3_jax.serving.metrics import Metrics
from eagle3_jax.serving.requests import Delta, Request
from eagle3_jax.speculate.acceptance import tau

_log = logging.getLogger("eagle3_jax.serving")


@runtime_checkable
class Streaming(Protocol):
    """An engine, as far as it is watched."""

    def stream(self, request: Request) -> AsyncIterator[Delta]: ...


@dataclass
class _Progress:
    """What is known of a request so far. Times: of time.monotonic()."""

    request: Request
    arrived: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    strategy: str | None = None
    reason: str | None = None
    error: str | None = None

    def take(self, delta: Delta, now: float) -> None:
        if delta.tokens:
            self.first, self.last = self.first or now, now
        if delta.accepted is not None:
            self.rounds, self.accepted = self.rounds + 1, self.accepted + delta.accepted
        self.tokens += len(delta.tokens)
        if delta.accepted is not None or self.strategy is None:  # else it says nothing of a round
            self.strategy = delta.strategy
        self.reason, self.error = delta.finish_reason, delta.error

    def facts(self, now: float) -> dict[str, Any]:
        """Of the log: counts, milliseconds, how it ended; None where there was nothing to measure."""
        return {
            "request_id": self.request.request_id,
            "finish_reason": self.reason,
            "prompt_tokens": len(self.request.prompt),
            "tokens": self.tokens,
            "ms": round(1000 * (now - self.arrived), 1),
            "first_token_ms": None if self.first is None else round(1000 * (self.first - self.arrived), 1),
            "strategy": self.strategy,
            "tau": round(tau(self.accepted, self.rounds), 3) if self.rounds else None,
            "error": self.error,
        }


class Observed:
    """`stream` of an engine, watched."""

    def __init__(self, engine: Streaming, metrics: Metrics):
        self._engine, self._metrics = engine, metrics
        self._told_of_draft = False

    async def stream(self, request: Request, left_for: Callable[[], str | None] = lambda: None) -> AsyncIterator[Delta]:
        """The engine's Deltas; raises what `engine.stream` raises.

        left_for: asked when the caller leaves before the last Delta: the finish reason that it found itself, as
        "stop" for a stop string; None counts as "cancelled".
        """
        progress = _Progress(request)
        try:
            async with aclosing(self._engine.stream(request)) as deltas:
                async for delta in deltas:
                    now, last = time.monotonic(), progress.last
                    since_last = None if last is None else now - last
                    self._metrics.token_step(delta, len(request.prompt), now - progress.arrived, since_last)
                    self._watch_draft(request, delta)
                    progress.take(delta, now)
                    yield delta
        except Exception as error:  # refused, or the engine died: told to the caller, and to the log
            progress.reason, progress.error = "error", f"{type(error).__name__}: {error}"
            if progress.strategy is None:
                _log.warning("request refused", extra={"facts": progress.facts(time.monotonic())})
                raise
            self._ended(progress)
            raise
        except BaseException:  # the caller left, or its task was cancelled
            progress.reason = progress.reason or left_for() or "cancelled"
            self._ended(progress)
            raise
        self._ended(progress)

    def _watch_draft(self, request: Request, delta: Delta) -> None:
        if not delta.finite and not self._told_of_draft:
            self._told_of_draft = True
            facts = {"request_id": request.request_id, "strategy": delta.strategy}
            _log.warning(
                "the draft's logits are not finite: it is accepted less, texts stay right", extra={"facts": facts}
            )

    def _ended(self, progress: _Progress) -> None:
        now = time.monotonic()
        reason = progress.reason or "error"  # an engine that stops without a last Delta has failed
        first = None if progress.first is None else progress.first - progress.arrived
        self._metrics.finished(reason, progress.tokens, now - progress.arrived, first)
        level = logging.WARNING if reason == "error" else logging.INFO
        _log.log(level, "request finished", extra={"facts": progress.facts(now)})

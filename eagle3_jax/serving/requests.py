"""What the API asks of the engine, and what comes back: the border between HTTP and generation."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from eagle3_jax.speculate.request import SamplingParams


@runtime_checkable
class Grammar(Protocol):
    """What a request's answer must match. It advances with committed tokens only, never with rejected drafts."""

    def mask(self) -> np.ndarray:
        """bool [V]: the tokens that may come next."""
        ...

    def advance(self, token: int) -> None:
        """Takes one committed token."""
        ...


@dataclass(frozen=True)
class Request:
    """One sequence to generate. `prompt`: token ids. strategy: None = the server's.

    logprobs: None = none wanted; k = of every token, and of the k likeliest tokens beside it. deadline: of
    `time.monotonic()`, in seconds.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    strategy: str | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None
    deadline: float | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one token, from the target's logits before temperature and processors: its own log probability, and the
    likeliest tokens with theirs, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Delta:
    """What one round (or the prefill) brought a request.

    tokens: committed, cut at stop tokens and limits; a stop token itself is not among them. depths: of each token, 0 if
    it is the target's own, d if it is the accepted draft token at depth d. accepted: draft tokens accepted in this
    round, before cutting; None for the prefill, whose token belongs to no round. strategy: of this round, as text.
    finish_reason: of the last delta, "stop", "length", "cancelled", "deadline" or "error"; `error` says why. finite:
    whether the draft's logits of this round were; if not, it is only accepted less.
    """

    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    accepted: int | None = None
    strategy: str = "plain"
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    finite: bool = True


class QueueFull(Exception):
    """The waiting queue is full; retry_after: seconds until a place is likely to be free."""

    def __init__(self, retry_after: float):
        super().__init__(f"the queue is full / try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class EngineStopped(Exception):
    """The engine is shutting down, or its thread died; no request is taken any more."""


@dataclass(frozen=True)
class Settings:
    """How an engine serves. Sizes are in tokens unless said otherwise.

    slots: sequences at once, each with room for max_len tokens, prompt and answer together. strategy: of requests that
    name none; strategies: what else is compiled at start ("plain" always); "auto" chooses among these. queue: requests
    that may wait beyond those that run. chunk: most prompt tokens read between two rounds, which bounds how long a
    prompt makes the others wait. prefix_reuse: a prompt that begins as an earlier text did need not read that again.
    """

    slots: int = 8
    max_len: int = 2048
    strategy: str = "auto"
    strategies: tuple[str, ...] = ()
    queue: int = 64
    chunk: int = 64
    prefix_reuse: bool = True


@dataclass(frozen=True)
class EngineStats:
    """What an engine holds now, and how much of its prompts it need not have read (`_total`, since the start; all else
    is counted from Deltas, see `metrics`).

    kv_tokens: entries of the slots that requests have, of all there are. kv_bytes: of all caches. prefix_queries_total:
    prompt tokens of requests that got a slot; prefix_hits_total: of these, those that were in a slot already.
    """

    running: int
    waiting: int
    kv_tokens_used: int
    kv_tokens_total: int
    kv_bytes: int
    prefix_queries_total: int
    prefix_hits_total: int

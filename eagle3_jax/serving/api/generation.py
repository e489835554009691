"""The engine requests of one API request: started together, their pieces merged as they come, cancelled together."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from eagle3_jax.serving.api.answer import ENDED, Answer, Piece
from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.requests import Delta, Request

_MOMENT = 0.5  # seconds


class Generation:
    """stream: as `Observed.stream`. answers: one for each request, which takes its Deltas.

    Iterating gives (number of the request, piece, tokens the engine brought) and raises what the engine raised.
    """

    def __init__(self, stream: Callable[..., Any], requests: Sequence[Request], answers: Sequence[Answer]):
        self._stream, self._requests, self._answers = stream, requests, answers
        self._items: deque[tuple[int, Piece, int] | Exception] = deque()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Sends the requests. Raises what the engine refuses within a moment, when the status of the answer is open."""
        pairs = enumerate(zip(self._requests, self._answers, strict=True))
        self._tasks = [asyncio.create_task(self._read(i, request, answer)) for i, (request, answer) in pairs]
        try:
            await asyncio.wait_for(self._arrived.wait(), _MOMENT)
        except TimeoutError:
            return
        if isinstance(self._items[0], Exception):
            raise self._items[0]

    async def close(self) -> None:
        """Cancels what still runs; nothing is left of it afterwards."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece, int]]:
        left = len(self._requests)
        while left:
            await self._arrived.wait()
            item = self._items.popleft()
            if isinstance(item, Exception):
                raise item
            if not self._items:
                self._arrived.clear()
            left -= item[1].finish_reason is not None
            yield item

    async def _read(self, number: int, request: Request, answer: Answer) -> None:
        try:
            async with aclosing(self._stream(request, lambda: answer.finish_reason)) as deltas:
                async for delta in deltas:
                    piece = answer.push(delta)
                    _check(delta)
                    self._items.append((number, piece, len(delta.tokens)))
                    self._arrived.set()
                    if piece.finish_reason and not delta.finish_reason:
                        return  # a stop string: leaving cancels the rest
            if answer.finish_reason is None:
                raise RuntimeError("the engine ended a request without a finish reason")
        except Exception as error:
            self._items.appendleft(error)
            self._arrived.set()


def _check(delta: Delta) -> None:
    """Raises ApiError for a request that failed."""
    if delta.finish_reason is None or delta.finish_reason in ENDED:
        return
    match delta.finish_reason:
        case "deadline":
            raise ApiError(504, "the request took longer than the server allows", code="timeout")
        case "cancelled":
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        case _:
            raise ApiError(500, f"generation failed: {delta.error or 'unknown reason'}", code="generation_failed")

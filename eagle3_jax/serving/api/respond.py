"""Sends an answer: all at once, or as server-sent events while it grows."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sse_starlette import EventSourceResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from eagle3_jax.serving.api.answer import Answer, Piece
from eagle3_jax.serving.api.errors import CLIENT_LEFT, as_api_error
from eagle3_jax.serving.api.fields import Sampled
from eagle3_jax.serving.api.generation import Generation
from eagle3_jax.serving.api.service import Service
from eagle3_jax.serving.api.stats import Stats, piece_stats
from eagle3_jax.serving.requests import Request


@runtime_checkable
class Choice(Protocol):
    """One choice of an answer, in the shape of chat or of completions."""

    answer: Answer

    def opening(self) -> dict[str, Any] | None:
        """Of a stream: the first chunk's choice."""
        ...

    def push(self, piece: Piece) -> dict[str, Any] | None:
        """Of a stream: the choice that carries this piece; None if it holds nothing to send."""
        ...

    def whole(self) -> dict[str, Any]:
        """Everything that was pushed."""
        ...


@dataclass
class Exchange:
    """One API request with what it needs to be answered. choices: one for each request.

    kind, chunk_kind: the `object` of a whole answer and of a chunk. prompt_tokens: of each prompt once. body: what was
    asked for.
    """

    id: str
    kind: str
    chunk_kind: str
    requests: Sequence[Request]
    choices: Sequence[Choice]
    prompt_tokens: int
    body: Sampled
    stats: Stats = field(default_factory=Stats)
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, service: Service, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": service.model, "choices": choices}

    def usage(self) -> dict[str, int]:
        generated = sum(choice.answer.token_count for choice in self.choices)
        total = self.prompt_tokens + generated
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": generated, "total_tokens": total}


async def respond(http: HttpRequest, service: Service, exchange: Exchange) -> Response:
    """Generates and answers. A client that leaves cancels its requests."""
    http.state.facts["answer_id"] = exchange.id
    answers = [choice.answer for choice in exchange.choices]
    generation = Generation(service.observed.stream, exchange.requests, answers)
    if not exchange.body.stream:
        return await _unless_left(http, generation, _whole(service, exchange, generation))
    try:
        await generation.start()
    except BaseException:
        await generation.close()
        raise
    return _Stream(_events(service, exchange, generation), generation)


async def _whole(service: Service, exchange: Exchange, generation: Generation) -> Response:
    await generation.start()
    async for number, piece, tokens in generation:
        exchange.choices[number].push(piece)
        exchange.stats.take(number, piece, tokens)
    body = exchange.envelope(service, exchange.kind, [choice.whole() for choice in exchange.choices])
    body["usage"] = exchange.usage()
    if exchange.body.eagle3:
        body["eagle3"] = exchange.stats.body()
    return JSONResponse(body)


async def _unless_left(http: HttpRequest, generation: Generation, work) -> Response:
    """The result of `work`, which is given up when the client leaves."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_client_left(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_LEFT)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        await generation.close()


async def _client_left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class _Stream(EventSourceResponse):
    """Ends its requests however it ends itself; also if the client leaves before the first event."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation):
        super().__init__(events)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._generation.close()


async def _events(service: Service, exchange: Exchange, generation: Generation) -> AsyncIterator[bytes]:
    """Chunks as server-sent events. The last one carries usage or the last finish_reason, and the `eagle3` object."""

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        if exchange.body.include_usage:
            more = {"usage": None} | more
        return _event(exchange.envelope(service, exchange.chunk_kind, choices) | more)

    try:
        for choice in exchange.choices:
            if (opening := choice.opening()) is not None:
                yield chunk([opening])
        left = len(exchange.choices)
        async for number, piece, tokens in generation:
            exchange.stats.take(number, piece, tokens)
            left -= piece.finish_reason is not None
            content = exchange.choices[number].push(piece)
            if content is not None:
                last = left == 0 and not exchange.body.include_usage
                yield chunk([content], **_eagle3(exchange, content, piece, last))
        if exchange.body.include_usage:
            final = {"eagle3": exchange.stats.body()} if exchange.body.eagle3 else {}
            yield chunk([], usage=exchange.usage(), **final)
    except Exception as error:
        yield _event(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


def _eagle3(exchange: Exchange, content: dict[str, Any], piece: Piece, last: bool) -> dict[str, Any]:
    """The `eagle3` of a chunk, if it has one: where its text came from (if the text is as generated), and at the end
    the sums."""
    if exchange.body.eagle3 is None:
        return {}
    sent = content["text"] if "text" in content else content["delta"].get("content")
    parts = piece_stats(piece) if exchange.body.eagle3.stats and sent and sent == piece.text else {}
    found = parts | (exchange.stats.body() if last else {})
    return {"eagle3": found} if found else {}


def _event(body: dict[str, Any]) -> bytes:
    # ASCII: many clients end a line at U+2028 or U+0085 as well, in the middle of an event.
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()

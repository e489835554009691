"""A server that speaks the streaming format of the real one from a script: what the page's tests run against, since it
costs nothing. What it answers depends on the prompt (see `_SCRIPTS`)."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from eagle3_jax.serving import page

KEY = "sesame"
MARKUP = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"
# of each prompt: seconds between steps, and the steps: (pieces, accepted)
_CHAIN = [
    ([["The", 0]], None),
    ([[" sky", 1], [" is", 2], [" blue", 3], [" be", 0]], 3),
    ([["cause", 1], [" of", 0]], 1),
    ([[" light", 0]], 0),
    ([[" é", 1], ["\n", 2], ["✓", 0]], 2),
]
_PLAIN = [([[text, 0]], None if i == 0 else 0) for i, text in enumerate(t for p, _ in _CHAIN for t, _ in p)]
ANSWER = "".join(text for pieces, _ in _CHAIN for text, _ in pieces)
_SCRIPTS = {
    "markup": (0.0, [([[MARKUP, 0]], None), ([["<b>", 1], ["bold", 0]], 1)]),
    "endless": (0.02, [([["word ", 1], ["more ", 0]], 1)] * 5000),
    "wide": (0.0, [([["x" * 600, 0]], None), ([["averylongword" * 30, 1], [" end", 0]], 1)]),
}


class Stub:
    """The application, and what it has been sent."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.left = threading.Event()  # set when a client leaves in the middle of an answer
        self.locked = False  # whether it wants KEY
        self.strategies: list[str] = []  # those it says it has
        self.failed: str | None = None  # why its engine died
        own = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=[*page.routes(), *own])

    def health(self, request: Request) -> JSONResponse:
        said = {"status": "dead" if self.failed else "ready", "error": self.failed}
        return JSONResponse(said, 503 if self.failed else 200)

    def models(self, request: Request) -> JSONResponse:
        own = {"strategies": self.strategies} if self.strategies else {}
        return self.refused(request) or JSONResponse({"object": "list", "data": [{"id": "stub", "eagle3": own}]})

    def refused(self, request: Request) -> JSONResponse | None:
        if self.locked and request.headers.get("authorization") != f"Bearer {KEY}":
            return _error(401, "wrong API key")
        return None

    async def chat(self, request: Request) -> JSONResponse | StreamingResponse:
        if refusal := self.refused(request):
            return refusal
        body = await request.json()
        self.bodies.append(body)
        prompt, strategy = body["messages"][-1]["content"], body["eagle3"]["strategy"]
        if prompt == "full":
            return _error(429, "the queue is full", {"Retry-After": "7"})
        if prompt == "bad":
            return _error(400, "max_tokens 160 does not fit / at most 12")
        plain = strategy == "plain"
        pause, steps = _SCRIPTS.get(prompt, (0.06 if plain else 0.03, _PLAIN if plain else _CHAIN))
        return StreamingResponse(
            self.stream(strategy, pause, steps, prompt == "broken" or (prompt == "halfway" and not plain)),
            media_type="text/event-stream",
        )

    async def stream(self, strategy: str, pause: float, steps: list, broken: bool) -> AsyncIterator[str]:
        accepted = [count for _, count in steps if count is not None]
        try:
            for number, (pieces, count) in enumerate(steps):
                if broken and number == 2:
                    yield _event(error={"message": "NaN logits"})
                    return
                await asyncio.sleep(pause)
                text = "".join(text for text, _ in pieces)
                own = {"pieces": pieces, "accepted": count, "strategy": strategy.replace("auto", "chain:3")}
                yield _event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}], eagle3=own)
        except asyncio.CancelledError:
            self.left.set()
            raise
        tokens = sum(len(pieces) for pieces, _ in steps)
        tau = 1 + sum(accepted) / len(accepted)
        depths = [] if strategy == "plain" else [sum(n > d for n in accepted) / len(accepted) for d in range(3)]
        whole = {"strategy": strategy, "tau": tau, "accepted": accepted, "tok_s": 12.5, "acceptance_by_depth": depths}
        yield _event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}
        yield _event(choices=[], usage=usage, eagle3=whole)
        yield "data: [DONE]\n\n"


def _event(**chunk: object) -> str:
    return f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'model': 'stub', **chunk})}\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "error"}}, status, headers)

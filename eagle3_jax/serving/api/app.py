"""The routes. `/v1/...`, /tokenize and /detokenize ask for the API key, if there is one; the others never do."""

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from eagle3_jax.errors import UserError
from eagle3_jax.serving import page
from eagle3_jax.serving.api.chat import chat_completions
from eagle3_jax.serving.api.completions import completions
from eagle3_jax.serving.api.errors import ApiError, error_response
from eagle3_jax.serving.api.guards import ApiKey, JsonOnly, SizeLimit, Traced
from eagle3_jax.serving.api.service import Service
from eagle3_jax.serving.api.tokens import detokenize, health, metrics, model, models, tokenize
from eagle3_jax.serving.requests import EngineStopped, QueueFull

MAX_BODY = 8 * 2**20


def create_app(
    service: Service,
    api_key: str | None = None,
    max_body: int = MAX_BODY,
    cors_origins: Sequence[str] = (),
) -> Starlette:
    """The server as an ASGI application. max_body: in bytes. cors_origins: pages of other hosts that may call it."""
    keyed = [] if api_key is None else [Middleware(ApiKey, key=api_key)]
    posted = [*keyed, Middleware(JsonOnly), Middleware(SizeLimit, limit=max_body)]

    def guarded(path: str, endpoint: Any, method: str) -> Route:
        return Route(path, endpoint, methods=[method], middleware=posted if method == "POST" else keyed)

    routes = [
        guarded("/v1/chat/completions", chat_completions, "POST"),
        guarded("/v1/completions", completions, "POST"),
        guarded("/v1/models", models, "GET"),
        guarded("/v1/models/{name:path}", model, "GET"),
        guarded("/tokenize", tokenize, "POST"),
        guarded("/detokenize", detokenize, "POST"),
        Route("/health", health),
        Route("/metrics", metrics),
        *page.routes(),
    ]
    middleware = [Middleware(Traced)]
    if cors_origins:
        shown = ["x-request-id", "retry-after"]
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": shown}
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(cors_origins), **allowed))
    expected = (ApiError, UserError, QueueFull, EngineStopped, RecursionError, HTTPException)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(expected, error_response))
    app.state.service = service
    return app

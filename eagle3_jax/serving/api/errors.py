"""Errors in OpenAI's shape, and which exception means which status."""

import logging
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from eagle3_jax.errors import UserError
from eagle3_jax.serving.requests import EngineStopped, QueueFull

_log = logging.getLogger("eagle3_jax.serving")
CLIENT_LEFT = 499  # nginx's; nobody receives it, the log shows it
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """status: of HTTP. param: the field at fault. code: as OpenAI's, where it has one."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """What the client is told. What is no fault of the request's is logged, with its traceback, and named 500."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            seconds = str(max(1, math.ceil(error.retry_after)))
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": seconds})
        case EngineStopped():
            return ApiError(503, str(error) or "the server is shutting down", headers={"Retry-After": "5"})
        case UserError():
            return ApiError(400, str(error))
        case ClientDisconnect():
            return ApiError(CLIENT_LEFT, "the client left before its request was whole")
        case RecursionError():
            return ApiError(400, "the body is nested too deeply")
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
        case _:
            _log.error("internal error", exc_info=error)
            return ApiError(500, "internal error: the server's log says more")


async def error_response(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler of every exception."""
    return as_api_error(error).response()

"""What every request passes before its handler: an id and a line of log; the API key; its body's type and size."""

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle3_jax.serving.api.errors import ApiError, as_api_error

_log = logging.getLogger("eagle3_jax.serving")
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
_QUIET = ("/health", "/metrics")  # asked every few seconds by machines


class Traced:
    """Outermost: the request's id comes in and goes out as x-request-id; one line of log, without any text of prompt or
    answer; an exception that nobody expected becomes a 500."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        facts = {"request_id": request_id, "method": scope["method"], "path": scope["path"]}
        scope.setdefault("state", {})["facts"] = facts
        began = time.monotonic()

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                facts["status"] = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
        except Exception as error:
            response = as_api_error(error).response()
            if "status" in facts:  # it has begun to answer: the connection is all that can be ended
                raise
            await response(scope, receive, send_traced)
        finally:
            facts["ms"] = round(1000 * (time.monotonic() - began), 1)
            _log.log(logging.DEBUG if scope["path"] in _QUIET else logging.INFO, "http", extra={"facts": facts})


class ApiKey:
    """Asks for `Authorization: Bearer KEY`. The comparison takes as long whatever of the key is right."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if not hmac.compare_digest(given.strip(), self._key) or scheme.lower() != b"bearer":
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)
        await self._app(scope, receive, send)


class JsonOnly:
    """Refuses bodies that are not said to be JSON. A page of another origin may send any server text or a form without
    asking; for JSON its browser asks first, and CORS says no."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("content-type", "")
        if given.partition(";")[0].strip().lower() != "application/json":
            said = f"not {given[:100]}" if given else "which is missing"
            raise ApiError(415, f"send the body with Content-Type: application/json, {said}")
        await self._app(scope, receive, send)


class SizeLimit:
    """Refuses bodies of more than `limit` bytes, announced or not, without reading them to the end."""

    def __init__(self, app: ASGIApp, limit: int):
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._limit:
            raise self._too_large()
        read = 0

        async def receive_limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        # The rest of the body is still coming: the connection cannot be used again.
        message = f"the body is larger than the {self._limit} bytes that this server takes"
        return ApiError(413, message, headers={"Connection": "close"})

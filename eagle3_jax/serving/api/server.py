"""The process: a listening socket, signals, and an end that lets running answers finish."""

import asyncio
import faulthandler
import logging
import os
import socket
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette

from eagle3_jax.errors import UserError

_log = logging.getLogger("eagle3_jax.serving")
_DEAD_SECONDS = 1.0  # in which a dead engine is seen in /health and its clients get their errors
_LAST_SECONDS = 10.0  # after --drain-seconds the process is gone: connections are closed, or it is cut


def listen(host: str, port: int) -> socket.socket:
    """A bound socket (port 0: any free one). Raises UserError if the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]  # which repeats the address
        raise UserError(f"cannot listen on {host}:{port} / {reason} / choose another --host or --port") from error


class Server(uvicorn.Server):
    """uvicorn, which ends when a signal comes or the engine dies.

    The first SIGTERM or SIGINT ends it gracefully: no new requests, running ones have `drain_seconds` to finish. Within
    ten seconds more the process is gone, whatever its threads are doing. The second signal ends it at once.
    """

    def __init__(self, app: Starlette, engine: Any, drain_seconds: float):
        quiet = {"log_config": None, "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, lifespan="off", ws="none", timeout_graceful_shutdown=5, **quiet))
        self.engine, self.drain_seconds = engine, drain_seconds
        self.engine_died = self._signalled = False

    def run_on(self, listener: socket.socket) -> int:
        """Serves; returns the exit code: 0, or 1 if the engine died."""
        self.run([listener])
        code = 1 if self.engine_died else 0
        if self.engine.state in ("warming", "draining"):  # its thread compiles for minutes, and cannot be interrupted
            sys.stderr.flush()
            os._exit(code)
        return code

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self._signalled:
            print("second signal: ending at once", file=sys.stderr, flush=True)
            os._exit(128 + sig)
        self._signalled = True
        # For what nothing in Python could end: it tells where all threads are, and exits with status 1.
        faulthandler.dump_traceback_later(self.drain_seconds + _LAST_SECONDS, exit=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Waits for what ends the server, and ends it."""
        state = None
        while not self._signalled and self.engine.state not in ("dead", "stopped"):
            if self.engine.state != state:
                state = self.engine.state
                _log.info(state)
            await asyncio.sleep(0.1)
        try:
            if self.engine.state not in ("warming", "dead"):
                _log.info("draining", extra={"facts": {"seconds": self.drain_seconds}})
                await self.engine.drain(self.drain_seconds)
            self.engine_died = self.engine.state == "dead"
            if self.engine_died:
                _log.error("the engine died", extra={"facts": {"error": self.engine.error}})
                await asyncio.sleep(_DEAD_SECONDS)
        finally:
            self.should_exit = True

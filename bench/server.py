"""`serve.py` as a process of its own for a benchmark: started on a free loopback port, watched, and ended."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.http_client import Address, request

_REPO = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Server:
    address: Address
    process: subprocess.Popen

    def rss_mb(self) -> float:
        """Resident memory of the server, in MB; NaN once it has ended."""
        if self.process.poll() is not None:
            return math.nan
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(status.split("VmRSS:")[1].split()[0]) / 1000


@asynccontextmanager
async def started(options: list[str], log: Path, patience: float = 600.0) -> AsyncIterator[Server]:
    """Runs `serve.py` with these options until it is ready; SIGTERM must end it within 30 s, with status 0.

    log: gets what the server prints. Raises RuntimeError, with the last lines of that, where a server fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(_REPO / "serve.py"), *options, "--port", str(port)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    server = Server(Address(port), process)
    try:
        await _ready(server, time.monotonic() + patience)
        yield server
        process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(process.wait, 30)
        if status:
            raise RuntimeError(f"the server ended with status {status} after SIGTERM")
    except RuntimeError as error:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise RuntimeError("\n".join([str(error), "the server's last lines:", *said])) from error
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def _ready(server: Server, until: float) -> None:
    while time.monotonic() < until:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.process.returncode} before it was ready")
        try:
            async with request(server.address, "/health") as reply:
                if reply.status == 200:
                    return
        except ConnectionError:
            pass  # not listening yet
        await asyncio.sleep(0.2)
    raise RuntimeError("the server did not get ready in time")

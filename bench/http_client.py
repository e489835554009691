"""A plain HTTP/1.1 client for load tests on loopback: one connection a request, server-sent events as they come.

Written by hand because of what it must do: send what is no request, hang up in the middle, and cost next to nothing
beside the server on the same processors.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Address:
    port: int
    api_key: str | None = None
    host: str = "127.0.0.1"


@dataclass
class Reply:
    """headers: names in lower case. `chunks` yields the body as it comes."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def chunks(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(self.headers.get("content-length", 0)))
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each server-sent event. Raises ConnectionError if the body ends without [DONE]."""
        rest = b""
        async for chunk in self.chunks():
            *blocks, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
            for block in blocks:
                data = b"".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)
        raise ConnectionError("the stream ended without [DONE]")


@asynccontextmanager
async def request(address: Address, path: str, body: Any = None) -> AsyncIterator[Reply]:
    """GET where there is no body, else POST; a body that is not bytes is sent as JSON. Leaving closes the connection,
    whatever has come by then. Raises ConnectionError or asyncio.IncompleteReadError."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {address.host}", "Connection: close"]
    head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    if address.api_key:
        head.append(f"Authorization: Bearer {address.api_key}")
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + content)
        await writer.drain()
        status = (await reader.readline()).split()
        if len(status) < 2:
            raise ConnectionError("the server closed the connection without an answer")
        headers = {}
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        yield Reply(int(status[1]), headers, reader)
    finally:
        writer.close()


async def metrics(address: Address) -> dict[str, float]:
    """{"name{labels}": value} of /metrics, without the prefix and the labels that all have."""
    async with request(address, "/metrics") as reply:
        lines = (await reply.body()).decode().splitlines()
    values: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name.partition("{")[0].removeprefix("eagle3:")] = float(value)
    return values

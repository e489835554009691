"""Asks an engine, and reads what it answered."""

import asyncio

import eagle3_jax as e3
from eagle3_jax.serving.engine import Engine
from eagle3_jax.serving.requests import Delta, Request

NEW = 24


def asked(name: str, prompt: list[int], new: int = NEW, **changes) -> Request:
    sampling = {key: changes.pop(key) for key in list(changes) if hasattr(e3.SamplingParams, key)}
    params = e3.SamplingParams(new, **{"stop_token_ids": ()} | sampling)
    return Request(name, tuple(prompt), params, **changes)


async def collect(engine: Engine, request: Request) -> list[Delta]:
    return [delta async for delta in engine.stream(request)]


def run(engine: Engine, *requests: Request) -> list[list[Delta]]:
    """All at once."""

    async def together():
        return await asyncio.wait_for(asyncio.gather(*(collect(engine, request) for request in requests)), 600)

    return asyncio.run(together())


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def accepted(deltas: list[Delta]) -> list[int]:
    return [delta.accepted for delta in deltas if delta.accepted is not None]

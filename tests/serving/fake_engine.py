"""A server without a model: an engine that plays scripts, a tokenizer of bytes, and uvicorn on a free port."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.app import create_app
from eagle3_jax.serving.api.service import Service
from eagle3_jax.serving.requests import Delta, Request, TokenLogprobs

TEMPLATE = (
    "{% for message in messages %}{{'<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|start|>", "<|end|>", "[TOOL_CALLS]", "<|python_tag|>")
END = 1
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("Ã", "¶"), ("l", "l"), ("Ġ", "Ġ"), ("ð", "Ł"), ("Ģ", "ð"))


def byte_tokenizer(template: str = TEMPLATE, bos: str | None = None) -> PreTrainedTokenizerFast:
    """Every byte is a token, and a few pieces of several bytes; any text can be said, any bytes can be."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *letters, *("".join(merge) for merge in MERGES)]
    inner = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(MERGES)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", bos_token=bos, chat_template=template)


TOKENIZER = byte_tokenizer()
VOCAB = len(TOKENIZER)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def blocks(
    tokens: Sequence[int], sizes: Sequence[int] = (1,), finish: str | None = "stop", logprobs=None
) -> list[Delta]:
    """Deltas of these tokens: the first alone (the prefill), the others in blocks of `sizes`, over and over."""
    entries = [TokenLogprobs(-t / 100, tuple((t + j, -(t + j) / 100) for j in range(logprobs or 0))) for t in tokens]
    deltas, start = [], 0
    while start < len(tokens) or not deltas:
        size = 1 if not deltas else sizes[(len(deltas) - 1) % len(sizes)]
        part = tuple(tokens[start : start + size])
        depths = (*range(1, len(part)), 0) if part else ()
        kept = None if logprobs is None else tuple(entries[start : start + size])
        deltas.append(Delta(part, depths, len(part) - 1 if deltas else None, "chain:3", kept))
        start += size
    last = deltas[-1]
    deltas[-1] = Delta(last.tokens, last.depths, last.accepted, last.strategy, last.logprobs, finish)
    return deltas


class FakeEngine:
    """Plays `script(request)`: Deltas, exceptions to raise, floats to sleep. Remembers what it was asked."""

    def __init__(self, script: Callable[[Request], Sequence[Any]]):
        self.script = script
        self.state, self.error = "ready", None
        self.requests: list[Request] = []
        self.left: list[str] = []  # ids of requests whose reader went before the end
        self.max_len = 4096

    def check(self, request: Request) -> None:
        total = len(request.prompt) + request.params.max_new_tokens
        if total > self.max_len:
            raise UserError(f"{len(request.prompt)} + {request.params.max_new_tokens} tokens / over {self.max_len}")

    async def stream(self, request: Request):
        self.requests.append(request)
        try:
            for step in self.script(request):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    await asyncio.sleep(0)
                    yield step
        except (GeneratorExit, asyncio.CancelledError):
            self.left.append(request.request_id)
            raise

    async def drain(self, seconds: float) -> None:
        self.state = "stopped"

    def stats(self):
        names = [
            "running",
            "waiting",
            "kv_tokens_used",
            "kv_tokens_total",
            "prompt_tokens_total",
            "prefix_hit_tokens_total",
        ]
        return SimpleNamespace(**dict.fromkeys(names, 0))


def saying(text: str, *sizes: int, finish: str = "stop") -> Callable[[Request], list[Delta]]:
    """A script that answers every request with this text, within its max_tokens."""

    def script(request: Request) -> list[Delta]:
        tokens = ids(text)
        cut = tokens[: request.params.max_new_tokens]
        return blocks(cut, sizes or (1,), finish if cut == tokens else "length", request.logprobs)

    return script


def make_service(engine: FakeEngine, tokenizer=TOKENIZER, **more: Any) -> Service:
    return Service(engine, tokenizer, "tiny", len(tokenizer), (END,), engine.max_len, **more)


@contextlib.contextmanager
def serving(app) -> Iterator[str]:
    """Runs the app on a free loopback port in a thread; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@contextlib.contextmanager
def fake_server(script: Callable[[Request], Sequence[Any]], tokenizer=TOKENIZER, timeout=None, **app: Any):
    """(address, engine) of a server whose engine plays `script`."""
    engine = FakeEngine(script)
    with serving(create_app(make_service(engine, tokenizer, timeout=timeout), **app)) as address:
        yield address, engine

"""A server without a model: an engine that plays scripts, and a tokenizer of bytes."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.app import create_app
from eagle3_jax.serving.api.service import Service
from eagle3_jax.serving.requests import Delta, Request, TokenLogprobs
from tests.serving.running import serving

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
HTTP = httpx2.Client()  # making one takes a tenth of a second; conftest.py closes it


def connect(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, http_client=HTTP)


VOCAB = len(TOKENIZER)
TEXT = "Hello wörld, the 🚀 end"
HI = [{"role": "user", "content": "hi"}]


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
        self.strategies = ("plain", "chain:3")

    def check(self, request: Request) -> None:
        if request.strategy == "chain:9":
            raise UserError("strategy chain:9 is not compiled / use another one")

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
            "prefix_queries_total",
            "prefix_hits_total",
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
def fake_server(script: Callable[[Request], Sequence[Any]], tokenizer=TOKENIZER, service=None, **app: Any):
    """(address, engine) of a server whose engine plays `script`. service: settings of `Service`."""
    engine = FakeEngine(script)
    with serving(create_app(make_service(engine, tokenizer, **service or {}), **app)) as address:
        yield address, engine


def get(address: str, **more) -> httpx2.Response:
    return HTTP.get(address, **more)


def post(server, path: str, body=None, **more) -> httpx2.Response:
    headers = {"Content-Type": "application/json"} | more.pop("headers", {})
    return HTTP.post(server[0] + path, headers=headers, **({"json": body} if body is not None else {}) | more)


def refused(answer: httpx2.Response, status: int = 400, param: str | None = None) -> str:
    """The message of an error in OpenAI's shape, of this status and about this field."""
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert error.keys() == {"message", "type", "param", "code"} and answer.headers["x-request-id"]
    assert param is None or error["param"] == param, error
    return error["message"]

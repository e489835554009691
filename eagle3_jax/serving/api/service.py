"""What the handlers share: the engine, the model's tokenizer and limits; a body to requests of the engine."""

import asyncio
import dataclasses
import functools
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from eagle3_jax.data.detokeniser import Vocabulary
from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.api.fields import ChatBody, CompletionBody
from eagle3_jax.serving.api.grammar import Grammars, json_schema
from eagle3_jax.serving.api.sampling import sampling_params
from eagle3_jax.serving.api.tools import ToolFormat, tool_format
from eagle3_jax.serving.metrics import Metrics
from eagle3_jax.serving.observed import Observed
from eagle3_jax.serving.requests import Request


@runtime_checkable
class Serving(Protocol):
    """An engine, as far as the API uses it."""

    state: str
    error: str | None
    strategies: Any

    def check(self, request: Request) -> None: ...
    def stream(self, request: Request) -> Any: ...
    def stats(self) -> Any: ...


@dataclass
class Service:
    """model: the name that requests may give. max_len: most tokens of a prompt and its answer. timeout: most seconds
    that a request may take, waiting included. most_requests: that the engine can hold, running and waiting. template:
    variables of the chat template, as in the draft's training; requests may give others."""

    engine: Serving
    tokenizer: Any
    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_len: int
    timeout: float | None = None
    most_requests: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        self.metrics = Metrics(self.engine, self.model)
        self.observed = Observed(self.engine, self.metrics)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids)
        # One thread: a tokenizer cannot be used from two at once, and the event loop must not wait for a request to be
        # read, checked and tokenised.
        self._texts = ThreadPoolExecutor(1, "texts")

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        return tool_format(self.tokenizer.chat_template)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            message = f"the model {name[:100]!r} does not exist here: this server has {self.model!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def check_length(self, characters: int, param: str) -> None:
        """Raises ApiError for a text that cannot fit, however long its tokens are, before it is tokenised."""
        if characters > self.max_len * self._longest_token:
            message = f"this model's maximum context length is {self.max_len} tokens"
            message += f", the prompt takes {characters} characters"
            raise ApiError(400, f"{message}: shorten it", param, "context_length_exceeded")

    @functools.cached_property
    def _longest_token(self) -> int:
        """In characters; four times that, since normalising may shorten a text."""
        return 4 * max(map(len, self.tokenizer.get_vocab()))

    def check_ready(self) -> None:
        """Raises ApiError 503 unless requests are taken now."""
        if self.engine.state != "ready":
            reason = self.engine.error or {"warming": "the server is starting"}.get(
                self.engine.state, "the server is shutting down"
            )
            raise ApiError(503, reason, code=self.engine.state, headers={"Retry-After": "5"})

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs work on the texts of requests beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, function, *arguments)

    def requests(
        self, body: ChatBody | CompletionBody, answer_id: str, prompts: Sequence[Sequence[int]]
    ) -> list[Request]:
        """For each prompt its n requests, with seeds seed, seed + 1, ... Raises ApiError or UserError if one of them
        could never be answered."""
        count = len(prompts) * (body.n or 1)
        if self.most_requests is not None and count > self.most_requests:
            message = f"{len(prompts)} prompts with n = {body.n or 1} are {count} requests"
            raise ApiError(400, f"{message}: this server holds {self.most_requests} at most", "n")
        new_grammar = self._new_grammar(body)
        seed = secrets.randbits(31) if body.seed is None else body.seed
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        requests = []
        for prompt in prompts:
            params = sampling_params(body, self.eos_token_ids, self.vocab_size, self._answer_length(body, len(prompt)))
            for i in range(body.n or 1):
                request = Request(
                    request_id=f"{answer_id}-{len(requests)}",
                    prompt=tuple(prompt),
                    params=dataclasses.replace(params, seed=seed + i),
                    strategy=body.eagle3.strategy if body.eagle3 else None,
                    logprobs=body.wanted_logprobs,
                    grammar=new_grammar() if new_grammar else None,
                    deadline=deadline,
                )
                self._check(request)
                requests.append(request)
        return requests

    def _check(self, request: Request) -> None:
        try:
            self.engine.check(request)
        except UserError as error:  # all else in it is checked by now
            raise ApiError(400, str(error), None if request.strategy is None else "eagle3.strategy") from error

    def _answer_length(self, body: ChatBody | CompletionBody, prompt: int) -> int:
        """Most tokens of an answer: what the body asks for, else what fits. Raises ApiError if that does not fit."""
        asked, room = body.longest, self.max_len - prompt
        if room < (asked or 1):
            wanted = f"{prompt} of the prompt" + (f" and {asked} of the answer" if asked else "")
            message = f"this model's maximum context length is {self.max_len} tokens, the request needs {wanted}"
            raise ApiError(400, f"{message}: shorten one of them", body.prompt_field, "context_length_exceeded")
        return asked or min(room, body.default_longest)

    def _new_grammar(self, body: ChatBody | CompletionBody) -> Callable[[], Any] | None:
        schema = json_schema(body.response_format)
        if schema is None:
            return None
        if body.ignore_eos or body.min_tokens:
            raise ApiError(400, "response_format goes with neither ignore_eos nor min_tokens", "response_format")
        return self.grammars.new(schema)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"

"""POST /v1/completions: text that goes on from a prompt."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from eagle3_jax.data.detokeniser import text_of
from eagle3_jax.data.template import text_ids
from eagle3_jax.serving.api.answer import Answer, AnswerToken, Piece
from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.api.fields import CompletionBody, parse
from eagle3_jax.serving.api.logprobs import completion_logprobs
from eagle3_jax.serving.api.respond import Exchange, respond
from eagle3_jax.serving.api.service import Service, new_id

_MOST_PROMPTS = 128


async def completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    exchange = await service.in_thread(_exchange, service, await http.body())
    return await respond(http, service, exchange)


def _exchange(service: Service, raw: bytes) -> Exchange:
    body = parse(CompletionBody, raw)
    service.check_model(body.model)
    given = prompts_of(body.prompt)
    prompts = [_ids(service, prompt) for prompt in given]
    service.check_ready()
    answer_id = new_id("cmpl")
    requests = service.requests(body, answer_id, prompts)
    echoes = [_echo(service, prompt) if body.echo else "" for prompt in given]
    each = body.n or 1
    choices = [CompletionChoice(service, body, i, echoes[i // each]) for i in range(len(requests))]
    return Exchange(answer_id, "text_completion", "text_completion", requests, choices, sum(map(len, prompts)), body)


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a body: text or token ids, one or a list. Raises ApiError for anything else."""

    def is_ids(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)

    prompts = [prompt] if isinstance(prompt, str) or is_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise ApiError(400, "prompt must be text, a list of texts, token ids, or a list of lists of them", "prompt")
    if len({type(each) for each in prompts}) > 1 or not all(isinstance(each, str) or is_ids(each) for each in prompts):
        raise ApiError(400, "prompt must be text, a list of texts, token ids, or a list of lists of them", "prompt")
    if len(prompts) > _MOST_PROMPTS:
        raise ApiError(400, f"prompt holds {len(prompts)} prompts: at most {_MOST_PROMPTS} go into a request", "prompt")
    return prompts


def _ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        service.check_length(len(prompt), "prompt")
    ids = text_ids(service.tokenizer, prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise ApiError(400, "prompt is empty: give at least one token", "prompt")
    if max(ids) >= service.vocab_size or min(ids) < 0:
        raise ApiError(400, f"prompt has token ids outside 0..{service.vocab_size - 1}", "prompt")
    return ids


def _echo(service: Service, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else text_of(service.vocabulary, prompt)


class CompletionChoice:
    """One choice: its text, after the prompt if that is echoed."""

    def __init__(self, service: Service, body: CompletionBody, index: int, echo: str):
        self.answer = Answer(service.vocabulary, body.stops, body.min_tokens or 0)
        self._vocabulary, self._index, self._echo = service.vocabulary, index, echo
        self._wants_logprobs = body.wanted_logprobs is not None
        self._text = ""
        self._tokens: list[AnswerToken] = []
        self._finish_reason: str | None = None

    def opening(self) -> dict[str, Any] | None:
        return self._choice(self._echo, None) if self._echo else None

    def push(self, piece: Piece) -> dict[str, Any] | None:
        self._text += piece.text
        self._tokens += piece.tokens
        self._finish_reason = piece.finish_reason
        tokens = piece.tokens if self._wants_logprobs and piece.tokens else None
        return self._choice(piece.text, tokens) if piece.text or tokens or piece.finish_reason else None

    def whole(self) -> dict[str, Any]:
        return self._choice(self._echo + self._text, self._tokens if self._wants_logprobs else None)

    def _choice(self, text: str, tokens: list[AnswerToken] | None) -> dict[str, Any]:
        logprobs = None if tokens is None else completion_logprobs(self._vocabulary, tokens)
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._finish_reason}

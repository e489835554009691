"""POST /v1/chat/completions."""

import json
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from eagle3_jax.data.template import prompt_ids
from eagle3_jax.errors import UserError
from eagle3_jax.serving.api.answer import Answer, AnswerToken, Piece
from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.api.fields import ChatBody, TokenizeBody, parse
from eagle3_jax.serving.api.logprobs import chat_logprobs
from eagle3_jax.serving.api.messages import template_messages, template_variables
from eagle3_jax.serving.api.respond import Exchange, respond
from eagle3_jax.serving.api.service import Service, new_id
from eagle3_jax.serving.api.tools import Call, ToolFormat, check_tools


async def chat_completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    exchange = await service.in_thread(_exchange, service, await http.body())
    return await respond(http, service, exchange)


def _exchange(service: Service, raw: bytes) -> Exchange:
    body = parse(ChatBody, raw)
    service.check_model(body.model)
    tools = check_tools(body.tools or [], body.tool_choice)
    if tools and body.response_format and body.response_format.get("type") != "text":
        raise ApiError(400, "response_format with tools is not supported", "response_format")
    if tools and body.parallel_tool_calls is False:
        raise ApiError(400, "parallel_tool_calls: false with tools is not supported", "parallel_tool_calls")
    tool_format = _tool_format(service, tools)
    prompt = chat_prompt(service, body, tools)
    service.check_ready()
    answer_id = new_id("chatcmpl")
    requests = service.requests(body, answer_id, [prompt])
    choices = [ChatChoice(service, body, i, tool_format) for i in range(len(requests))]
    kinds = ("chat.completion", "chat.completion.chunk")
    return Exchange(answer_id, *kinds, requests, choices, len(prompt), body)


def chat_prompt(service: Service, body: ChatBody | TokenizeBody, tools: list[dict[str, Any]] | None) -> list[int]:
    """The ids of a chat, exactly as training sees them. Raises ApiError if it cannot be rendered."""
    service.check_length(sum(map(_characters, (body.messages, tools, body.chat_template_kwargs))), "messages")
    template = str(service.tokenizer.chat_template or "")
    rendered = template_messages(body.messages, knows_developer="developer" in template)
    own = template_variables(body.chat_template_kwargs or {}, template, service.tokenizer)

    def ids(tools: list[dict[str, Any]] | None) -> list[int]:
        try:
            return prompt_ids(service.tokenizer, rendered, "messages", tools, {**service.template, **own})
        except UserError as error:
            raise ApiError(400, str(error), "messages") from error

    prompt = ids(tools)
    if tools and prompt == ids(None):
        raise ApiError(400, "tools: the model's chat template takes none", "tools")
    return prompt


def _characters(value: Any) -> int:
    """Of all texts in a JSON value, and a few for each member."""
    return 0 if value is None else len(json.dumps(value, ensure_ascii=False))


def _tool_format(service: Service, tools: list[dict[str, Any]] | None) -> ToolFormat | None:
    if not tools:
        return None
    if service.tool_format is None:
        raise ApiError(400, "tools: the form in which this model calls tools is not known", "tools")
    return service.tool_format


class ChatChoice:
    """One choice: text, or tool calls with text around them."""

    def __init__(self, service: Service, body: ChatBody, index: int, tool_format: ToolFormat | None):
        shown = _token_ids(service, tool_format.markers) if tool_format else ()
        self.answer = Answer(service.vocabulary, body.stops, body.min_tokens or 0, shown)
        self._vocabulary, self._index = service.vocabulary, index
        self._parser = tool_format.parser() if tool_format else None
        self._wants_logprobs = body.wanted_logprobs is not None
        self._content = ""
        self._calls: list[Call] = []
        self._tokens: list[AnswerToken] = []
        self._finish_reason: str | None = None

    def opening(self) -> dict[str, Any]:
        return self._choice("delta", {"role": "assistant", "content": ""}, None)

    def push(self, piece: Piece) -> dict[str, Any] | None:
        content, calls = piece.text, []
        if self._parser:
            content, calls = self._parser.push(content)
            if piece.finish_reason:
                rest, more = self._parser.finish()
                content, calls = content + rest, calls + more
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            numbers = range(len(self._calls), len(self._calls) + len(calls))
            delta["tool_calls"] = [{"index": n} | call.body() for n, call in zip(numbers, calls, strict=True)]
        self._content += content
        self._calls += calls
        self._tokens += piece.tokens
        self._finish_reason = piece.finish_reason
        if self._calls and piece.finish_reason == "stop":
            self._finish_reason = "tool_calls"
        tokens = piece.tokens if self._wants_logprobs and piece.tokens else None
        return self._choice("delta", delta, tokens) if delta or tokens or piece.finish_reason else None

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message["tool_calls"] = [call.body() for call in self._calls]
            message["content"] = self._content or None
        return self._choice("message", message, self._tokens if self._wants_logprobs else None)

    def _choice(self, name: str, content: dict[str, Any], tokens: list[AnswerToken] | None) -> dict[str, Any]:
        logprobs = None if tokens is None else chat_logprobs(self._vocabulary, tokens)
        return {"index": self._index, name: content, "logprobs": logprobs, "finish_reason": self._finish_reason}


def _token_ids(service: Service, names: tuple[str, ...]) -> frozenset[int]:
    """The special tokens among `names`."""
    known = service.vocabulary
    return frozenset(token for token in known.special if known.bytes_of(token).decode() in names)

"""Chat messages as a client sends them, as the model's chat template takes them."""

import inspect
import re
from typing import Any

from eagle3_jax.serving.api import strict_json
from eagle3_jax.serving.api.errors import ApiError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id"}
_EMPTY = {"refusal", "audio", "function_call", "annotations", "reasoning_content", "reasoning"}  # if empty


def template_messages(messages: list[dict[str, Any]], knows_developer: bool = False) -> list[dict[str, Any]]:
    """The messages with text as content and tool arguments as objects. Raises ApiError for what no text can say.

    Parts of a content are joined by a newline (as in vLLM). knows_developer: the template has this role; else it is
    called system.
    """
    if not messages:
        raise ApiError(400, "messages is empty: give at least one", "messages")
    return [_message(message, f"messages[{i}]", knows_developer) for i, message in enumerate(messages)]


def template_variables(given: dict[str, Any], template: str, tokenizer: Any) -> dict[str, Any]:
    """What `chat_template_kwargs` gives a chat template besides the messages. Raises ApiError for a name that is not a
    variable of the template, so that none is ignored, and for those that are set in other ways."""
    variables = {name: value for name, value in given.items() if value is not None}
    for name in variables:
        where = f"chat_template_kwargs.{name}"
        if name in inspect.signature(tokenizer.apply_chat_template).parameters or name == "messages":
            raise ApiError(400, f"{where} is not a variable of the chat template", "chat_template_kwargs")
        if not name.isidentifier() or not re.search(rf"\b{re.escape(name)}\b", template):
            raise ApiError(400, f"{where}: the model's chat template has no such variable", "chat_template_kwargs")
    return variables


def _message(message: dict[str, Any], where: str, knows_developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise ApiError(400, f"{where}.role is {role!r}: use {', '.join(_ROLES)}", f"{where}.role")
    given = {name: value for name, value in message.items() if value is not None}
    unknown = [name for name, value in given.items() if name not in _FIELDS and (name not in _EMPTY or value)]
    if unknown:
        raise ApiError(400, f"{where}.{unknown[0]} is not supported", f"{where}.{unknown[0]}")
    rendered = {"role": "system" if role == "developer" and not knows_developer else role}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            rendered[name] = _text(message[name], f"{where}.{name}")
    if (calls := message.get("tool_calls")) is not None:
        if calls and role != "assistant":
            raise ApiError(400, f"{where}.tool_calls: only assistant messages have them", f"{where}.tool_calls")
        called = _calls(calls, f"{where}.tool_calls")
        rendered |= {"tool_calls": called} if called else {}
    if message.get("content") is None and calls is None:
        raise ApiError(400, f"{where}.content is missing", f"{where}.content")
    return rendered | {"content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        return _text(content, where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise ApiError(400, f"{where} is of type {kind}: this server reads text only", where)
    if extra := [name for name, value in part.items() if name not in ("type", "text") and value is not None]:
        raise ApiError(400, f"{where}.{min(extra)} is not supported", where)
    return _text(part.get("text"), f"{where}.text")


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ApiError(400, f"{where} must be a list", where)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    call = call if isinstance(call, dict) else {}
    name, function = call.get("id"), call.get("function")
    good = isinstance(name, str | None) and call.get("type") in (None, "function") and isinstance(function, dict)
    if not good or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where} must be {{id, type, function: {{name, arguments}}}}", where)
    try:
        arguments = strict_json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError) as error:
        raise ApiError(400, f"{where}.function.arguments must be a JSON object in a string", where) from error
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where}.function.arguments must be a JSON object in a string", where)
    return {"id": name, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ApiError(400, f"{where} must be text, not {type(value).__name__}", where)
    return value

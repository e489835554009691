"""Tool calls in an answer's text, in the formats of three families, found by what the chat template says.

    hermes   <tool_call>{"name": .., "arguments": {..}}</tool_call>, any number, text around them   (Qwen, Hermes)
    llama3   the whole answer is {"name": .., "parameters": {..}}, several separated by ;           (Llama since 3.1)
    mistral  [TOOL_CALLS] and then a JSON list, or name{..} for each call                           (Mistral)

A call is given out when it is complete, so that the result does not depend on how the text was cut. What does not
parse is the model's text and is given out as such.
"""

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eagle3_jax.serving.api import strict_json
from eagle3_jax.serving.api.errors import ApiError
from eagle3_jax.serving.api.stops import overlap

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_NAMED = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Call:
    """arguments: JSON of an object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolFormat:
    """markers: what the parser must see of the text, even if it is a special token. parser: of one answer."""

    name: str
    markers: tuple[str, ...]
    parser: "Callable[[], Tagged | Whole]"


def tool_format(template: str | dict[str, str] | None) -> ToolFormat | None:
    """The format that a chat template asks the model for; None if it is not one of those known here. Of several
    templates, by name, `tool_use` is the one that is rendered with tools."""
    if isinstance(template, dict):
        template = template.get("tool_use", template.get("default"))
    template = template or ""
    if _OPEN in template and "<function=" not in template:
        return ToolFormat("hermes", (_OPEN, _CLOSE), Tagged)
    if _MISTRAL in template:
        return ToolFormat("mistral", (_MISTRAL, "[ARGS]", "[CALL_ID]"), lambda: Whole(_MISTRAL, _mistral_calls))
    if '"parameters"' in template.replace('\\"', '"') and '{"name"' in template.replace('\\"', '"'):
        return ToolFormat("llama3", (_PYTHON_TAG,), lambda: Whole(None, _llama_calls))
    return None


def check_tools(tools: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]] | None:
    """The tools to render, None for none. Raises ApiError for a definition or a choice that is not supported."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ApiError(400, f"tools[{i}] must be {{type: function, function: {{name, ..}}}}", f"tools[{i}]")
        if unknown := _given(tool) - {"type", "function"}:
            raise ApiError(400, f"tools[{i}].{min(unknown)} is not supported", f"tools[{i}]")
        if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
            raise ApiError(400, f"tools[{i}].function.name must be 1 to 64 letters, digits, _ . -", f"tools[{i}]")
        if unknown := _given(function) - {"name", "description", "parameters", "strict"}:
            raise ApiError(400, f"tools[{i}].function.{min(unknown)} is not supported", f"tools[{i}]")
        if function.get("strict"):
            raise ApiError(400, f"tools[{i}].function.strict is not supported", f"tools[{i}]")
        if not isinstance(function.get("parameters"), dict | None):
            raise ApiError(400, f"tools[{i}].function.parameters must be a JSON schema", f"tools[{i}]")
    if choice not in (None, "none", "auto"):
        raise ApiError(400, 'tool_choice: only "none" and "auto" are supported', "tool_choice")
    if choice == "auto" and not tools:
        raise ApiError(400, "tool_choice is only allowed with tools", "tool_choice")
    return tools if tools and choice != "none" else None


def _given(value: dict[str, Any]) -> set[str]:
    """Its fields; null is not given."""
    return {name for name, inner in value.items() if inner is not None}


class Tagged:
    """Hermes: calls between two tags, text before, between and after; blanks beside a call belong to neither."""

    def __init__(self):
        self._text = ""  # not given out yet
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Takes text of the answer; returns text of the message, and calls that are complete."""
        self._text += text
        content, calls = "", []
        while (start := self._text.find(_OPEN)) >= 0:
            before, inside = self._text[:start].rstrip(), self._text[start + len(_OPEN) :]
            call, end = _closed(inside)
            if end is None:
                content, self._text = content + self._plain(before), self._text[start:]
                return content, calls
            if call is None:
                content += self._plain(self._text[:start] + _OPEN + inside[:end])
            else:
                content, self._after_call = content + self._plain(before), True
                calls.append(call)
            self._text = inside[end:]
        certain = len(self._text[: len(self._text) - overlap(self._text, _OPEN)].rstrip())
        content, self._text = content + self._plain(self._text[:certain]), self._text[certain:]
        return content, calls

    def finish(self) -> tuple[str, list[Call]]:
        """At the end of the answer. A call without its closing tag counts if it is complete."""
        rest, self._text = self._text, ""
        call = _call(_json(rest.removeprefix(_OPEN))) if rest.startswith(_OPEN) else None
        return ("", [call]) if call else (self._plain(rest), [])

    def _plain(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        return text


def _closed(text: str) -> tuple[Call | None, int | None]:
    """The call that `text` begins with, and where its closing tag ends: (None, end) if it is none, (None, None) if the
    tag has not come yet. The tag may also stand in a string of the arguments."""
    try:
        value, end = strict_json.first_value(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Unterminated string"):
            return None, None
        value, end = None, getattr(error, "pos", 0)
    call, close = _call(value), text.find(_CLOSE, end)
    if close < 0:
        return None, None
    return (None if text[end:close].strip() else call), close + len(_CLOSE)


class Whole:
    """Calls from a marker to the end of the answer. marker: None = the answer begins with a call or is none."""

    def __init__(self, marker: str | None, calls_of: Callable[[str], list[Call]]):
        self._marker, self._calls_of = marker, calls_of
        self._text = ""  # not given out yet
        self._calling: bool | None = None if marker is None else False  # None: not known yet

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._text += text
        certain = 0
        if self._calling is None:
            begun = self._text.lstrip()
            if begun.startswith(("{", _PYTHON_TAG)):
                self._calling = True
            elif not _PYTHON_TAG.startswith(begun):
                self._calling = False
        if self._calling is False and self._marker is None:
            certain = len(self._text)
        elif self._calling is False:
            start = self._text.find(self._marker)
            self._calling = start >= 0
            before = self._text[: start if start >= 0 else len(self._text) - overlap(self._text, self._marker)]
            certain = len(before.rstrip())
        content, self._text = self._text[:certain], self._text[certain:]
        return content, []

    def finish(self) -> tuple[str, list[Call]]:
        calls = self._calls_of(self._text.strip()) if self._calling else []
        return ("" if calls else self._text), calls


def _llama_calls(text: str) -> list[Call]:
    return _sequence(text.removeprefix(_PYTHON_TAG), "parameters", lambda rest: rest.lstrip().removeprefix(";"))


def _mistral_calls(text: str) -> list[Call]:
    text = text.removeprefix(_MISTRAL).strip()
    if text.startswith("["):
        listed = _json(text)
        calls = [_call(item) for item in listed] if isinstance(listed, list) else []
    else:
        calls = []
        while text:
            named = _NAMED.match(text)
            value, end = _first_json(text[named.end() :]) if named else (None, 0)
            calls.append(Call(named[1], _dumped(value)) if isinstance(value, dict) else None)
            text = text[named.end() + end :].strip() if calls[-1] else ""
    if not calls or None in calls:
        return []
    letters = string.ascii_letters + string.digits  # its template takes ids of nine of these only
    return [Call(c.name, c.arguments, "".join(secrets.choice(letters) for _ in range(9))) for c in calls]


def _sequence(text: str, arguments: str, after: Callable[[str], str]) -> list[Call]:
    """All calls of a text that consists of nothing else; empty if it does not."""
    calls = []
    while text.strip():
        value, end = _first_json(text.lstrip())
        calls.append(_call(value, arguments))
        if calls[-1] is None:
            return []
        text = after(text.lstrip()[end:])
    return calls


def _first_json(text: str) -> tuple[Any, int]:
    try:
        return strict_json.first_value(text)
    except (ValueError, RecursionError):
        return None, 0


def _json(text: str) -> Any:
    """The value that `text` is, None if it is no JSON."""
    value, end = _first_json(text.strip())
    return value if end == len(text.strip()) else None


def _call(value: Any, arguments: str = "arguments") -> Call | None:
    """The call that a JSON value describes; arguments may also be given under the other families' name."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = next((value[key] for key in (arguments, "arguments", "parameters") if key in value), {})
    given = _json(given) if isinstance(given, str) else given
    return Call(value["name"], _dumped(given)) if isinstance(given, dict) else None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Training records in every usual form (conversations, token rows, rendered text), and prompt files.

Every fault is reported with file and row; nothing is skipped or repaired, because a skipped row changes what is trained
on without anyone noticing.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_jax.data.files import rows
from eagle3_jax.errors import UserError
from eagle3_jax.files import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's names. Its `function_call` is left out: systems disagree on how it is rendered.
SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}
CHAT_KEYS = ("conversations", "messages")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # one key, by model; the template reads its own
MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", *THOUGHTS)
SHAPES = (
    '{"conversations": [{"role", "content"} or {"from", "value"}, ...]}, {"messages": [...]}, '
    '{"input_ids": [...], "loss_mask": [...]} or {"text": "..."} with the chat template applied'
)


class _Located:
    """Where a record came from. source: its `source` key, else the file's name; evaluation is reported by it."""

    line: int
    path: str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}" if self.path else f"row {self.line}"


@dataclass(frozen=True)
class Conversation(_Located):
    """A chat: `messages` as `{"role", "content", ...}`, and the tools it was given, as chat templates take them."""

    messages: list[dict[str, Any]]
    line: int
    path: str = ""
    tools: list[dict[str, Any]] | None = None
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class TokenRow(_Located):
    """Token ids with a 0/1 loss mask of the same length, already tokenised elsewhere."""

    input_ids: list[int]
    loss_mask: list[int]
    line: int
    path: str = ""
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class TextRow(_Located):
    """A chat as text, rendered elsewhere with the target's own chat template."""

    text: str
    line: int
    path: str = ""
    source: str = field(default="", compare=False)


Record = Conversation | TokenRow | TextRow


def read_records(path: str | Path) -> list[Record]:
    """Reads training records from a file that `files.rows` reads, in its order.

    A row holds `conversations` or `messages` (with `system` and `tools` beside them, if any), or `input_ids` with
    `loss_mask`, or `text`; other keys are ignored. Conversations without an assistant turn are kept: they are counted
    when packing. Raises UserError, with file and row, for a missing or empty file, broken JSON, another shape of row,
    unknown roles and keys of messages, content that is not text, masks that are not 0/1 and lengths that differ.
    """
    return [_record(row, str(path), number) for number, row in rows(path)]


def counts(path: str | Path) -> dict[str, int]:
    """How many records of which kind `read_records` finds in a file, and how many answers its conversations hold."""
    records = read_records(path)
    kinds = {"conversations": Conversation, "token_rows": TokenRow, "text_rows": TextRow}
    chats = [record for record in records if isinstance(record, Conversation)]
    return {
        "rows": len(records),
        **{name: sum(isinstance(record, kind) for record in records) for name, kind in kinds.items()},
        "messages": sum(len(chat.messages) for chat in chats),
        "answers": sum(message["role"] == "assistant" for chat in chats for message in chat.messages),
        "without_answers": sum(all(m["role"] != "assistant" for m in chat.messages) for chat in chats),
    }


def read_prompts(path: str | Path) -> list[list[str]]:
    """Reads prompts from a file with `"turns": [str, ...]` in each row: the user turns of one conversation each.

    Raises UserError, with file and row, for a missing or empty file, broken JSON and rows without such turns.
    """
    prompts = []
    for line, row in rows(path):
        where = f"{path}:{line}"
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns:
            raise UserError(f'{where}: a prompt row needs "turns", a list of one or more strings; found {_keys(row)}')
        prompts.append([_text(turn, where, f"turns[{i}]") for i, turn in enumerate(turns)])
    return prompts


def _record(row: dict[str, Any], path: str, line: int) -> Record:
    where = f"{path}:{line}"
    row = {key: value for key, value in row.items() if value is not None}  # columns that other rows of a table have
    chats = [key for key in CHAT_KEYS if key in row]
    tokens, text = "input_ids" in row and "loss_mask" in row, "text" in row
    if len(chats) + tokens != 1 and not (text and not chats and not tokens):
        problem = "more than one kind of data in a row" if chats else "unknown shape of row"
        raise UserError(f"{where}: {problem} ({_keys(row)}); accepted: {SHAPES}")
    source = row.get("source")
    source = _text(source, where, "source") if isinstance(source, str) and source else Path(path).name
    if tokens:
        return _token_row(row, path, line, source)
    if not chats:
        return TextRow(_text(row["text"], where, "text"), line, path, source)
    messages, tools = _messages(row[chats[0]], chats[0], where), _tools(row.get("tools"), where)
    return Conversation(_with_system(messages, row.get("system"), where), line, path, tools, source)


def _messages(messages: Any, key: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: "{key}" must be a list of one or more messages')
    return [_message(message, where, f"{key}[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str, name: str) -> dict[str, Any]:
    found = _keys(message) if isinstance(message, dict) else type(message).__name__
    given = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    own, sharegpt = "role" in given, "from" in given
    if own == sharegpt or ("content" if own else "value") not in given and "tool_calls" not in given:
        null = [key for key in message if key not in given] if isinstance(message, dict) else []
        found += f" ({', '.join(null)} null)" if null else ""
        raise UserError(f'{where}: {name} needs "role" and "content", or "from" and "value"; found {found}')
    if sharegpt:
        given["role"] = SHAREGPT.get(str(given.pop("from")), message["from"])
        given["content"] = given.pop("value", "")
    if given["role"] not in ROLES:
        accepted = ", ".join([*ROLES, *SHAREGPT])
        raise UserError(f"{where}: {name} has unknown role {given['role']!r}; accepted: {accepted}")
    # A key may change what is rendered or trained on (weight, train), so none is dropped; servers write empty ones.
    extra = [key for key in given if key not in MESSAGE_KEYS and given[key] not in ("", [], {})]
    # Thoughts are one text, which some servers write under two names for readers of either. Blank ones are none.
    thoughts = {key: _text(given[key], where, f"{name} {key}") for key in THOUGHTS if key in given}
    if extra or len(set(thoughts.values())) > 1:
        keys = ", ".join(extra or thoughts)
        raise UserError(f"{where}: {name} has keys that have no one meaning ({keys}); put it all into content")
    clean = {"role": given["role"], "content": _content(given.get("content", ""), given["role"], where, name)}
    clean |= {key: text for key, text in thoughts.items() if text.strip()}
    for key in ("name", "tool_call_id"):
        if key in given:
            clean[key] = _text(given[key], where, f"{name} {key}")
    if given.get("tool_calls"):
        if given["role"] != "assistant":
            raise UserError(f"{where}: {name} has tool_calls, which only an assistant message can have")
        clean["tool_calls"] = _tool_calls(given["tool_calls"], where, name)
    return clean


def _content(value: Any, role: str, where: str, name: str) -> str:
    """A string, or OpenAI's list of text parts, joined by newlines as our server does it (and vLLM). What a model
    generated is one text."""
    name = f"{name} content"
    if not isinstance(value, list):
        return _text(value, where, name)
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise UserError(f"{where}: {name} has a part of type {kind}; only text is trained on")
    if role == "assistant" and len(value) != 1:
        raise UserError(f"{where}: {name} has {len(value)} parts, but a model generates one text; join them")
    return "\n".join(_text(part.get("text"), where, name) for part in value)


def _tool_calls(value: Any, where: str, name: str) -> list[dict[str, Any]]:
    """OpenAI's tool calls. Their arguments are JSON in a string there and an object for templates, as servers do it."""
    calls = _json(value, where, f"{name} tool_calls")
    good = isinstance(calls, list) and all(
        isinstance(c, dict) and isinstance(c.get("function", c), dict) for c in calls
    )
    if not good or any("name" not in call.get("function", call) for call in calls):
        raise UserError(f'{where}: {name} tool_calls must be a list of {{"function": {{"name", "arguments"}}}}')
    clean = []
    for call in calls:
        function = dict(call.get("function", call))
        function["arguments"] = _json(function.get("arguments") or {}, where, f"{name} tool_calls arguments")
        if not isinstance(function["arguments"], dict):
            raise UserError(f"{where}: {name} tool_calls arguments must be an object")
        clean.append({**call, "function": function} if "function" in call else function)
    return clean


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    tools = _json(value, where, "tools") if value else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f'{where}: "tools" must be a list of objects (JSON schemas of functions)')
    return tools or None


def _json(value: Any, where: str, name: str) -> Any:
    """The value, parsed if it is JSON in a string. UserError for what is none, and for text that no tokenizer takes."""
    try:
        value = parse_json(value) if isinstance(value, str) else value
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{where}: {name} is a string but not JSON, or holds what JSON does not have ({error})"
        ) from error
    _text(text, where, name)
    return value


def _with_system(messages: list[dict[str, Any]], system: Any, where: str) -> list[dict[str, Any]]:
    """The conversation after the row's own `system` prompt, if it has one."""
    if system is None or system == "":
        return messages
    first = {"role": "system", "content": _text(system, where, "system")}
    if messages[0]["role"] != "system":
        return [first, *messages]
    if messages[0] != first:
        raise UserError(f'{where}: "system" and a first system message that differs; leave one out')
    return messages


def _token_row(row: dict[str, Any], path: str, line: int, source: str) -> TokenRow:
    where = f"{path}:{line}"
    ids, mask = row["input_ids"], row["loss_mask"]
    if not isinstance(ids, list) or not isinstance(mask, list) or not ids:
        raise UserError(f'{where}: "input_ids" and "loss_mask" must be lists with one or more entries')
    if len(ids) != len(mask):
        raise UserError(f"{where}: {len(ids)} input_ids but {len(mask)} loss_mask entries; they must be equally long")
    for i, value in enumerate(ids):
        if type(value) is not int:
            raise UserError(f"{where}: input_ids[{i}] is {value!r}; token ids are integers")
    for i, value in enumerate(mask):
        if not isinstance(value, int) or value not in (0, 1):
            raise UserError(f"{where}: loss_mask[{i}] is {value!r}; a loss mask holds 0 and 1 only")
    return TokenRow(ids, [int(value) for value in mask], line, path, source)


def _text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be a string, found {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: {name} has half a surrogate pair at character {error.start}; repair the text"
        ) from error
    return value


def _keys(row: dict[str, Any]) -> str:
    return f"keys {', '.join(map(str, row))}" if row else "no keys"

"""Reading JSONL, plain or gzipped (`.gz`): training records (conversations or ready token rows) and prompt files.

Every fault is reported with file and line; nothing is skipped or repaired, because a skipped row changes what is
trained on without anyone noticing.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
CHAT_KEYS = ("conversations", "messages")
SHAPES = (
    '{"conversations": [{"role", "content"}, ...]}, {"messages": [...]} or {"input_ids": [...], "loss_mask": [...]}'
)


@dataclass(frozen=True)
class Conversation:
    """A chat: `messages` as `{"role": str, "content": str}`, and where it came from."""

    messages: list[dict[str, str]]
    line: int
    path: str = ""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}" if self.path else f"row {self.line}"


@dataclass(frozen=True)
class TokenRow:
    """Token ids with a 0/1 loss mask of the same length, already tokenised elsewhere."""

    input_ids: list[int]
    loss_mask: list[int]
    line: int
    path: str = ""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}" if self.path else f"row {self.line}"


Record = Conversation | TokenRow


def read_records(path: str | Path) -> list[Record]:
    """Reads training records from a JSONL file, in file order; blank lines are ignored.

    A row holds `conversations` (or `messages`), or `input_ids` with `loss_mask`; other keys are ignored. Conversations
    without an assistant turn are kept: they are counted when packing. Raises UserError, with file and line, for a
    missing or empty file, broken JSON, another shape of row, unknown roles, content that is not text, masks that are
    not 0/1 and lengths that differ.
    """
    return [_record(row, str(path), line) for line, row in _rows(path)]


def read_prompts(path: str | Path) -> list[list[str]]:
    """Reads prompts from a JSONL file with `"turns": [str, ...]` in each row: the user turns of one conversation each.

    Raises UserError, with file and line, for a missing or empty file, broken JSON and rows without such turns.
    """
    prompts = []
    for line, row in _rows(path):
        where = f"{path}:{line}"
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns:
            raise UserError(f'{where}: a prompt row needs "turns", a list of one or more strings; found {_keys(row)}')
        prompts.append([_text(turn, where, f"turns[{i}]") for i, turn in enumerate(turns)])
    return prompts


def _rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) for each line that is not blank."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: no permission to read it")
    empty = True
    for line, raw in _lines(path):
        if not raw.strip():
            continue
        empty = False
        where = f"{path}:{line}"
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: bad JSON ({error.msg}, column {error.colno}); JSONL has one object a line"
            ) from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected one JSON object a line (JSONL), found a {type(row).__name__}")
        yield line, row
    if empty:
        raise UserError(f"{path}: the file is empty; expected one JSON object a line")


def _lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, split at b"\\n" alone: str.splitlines would also cut at U+2028, legal inside a JSON string."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            yield from enumerate(file, start=1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}); write it again or give it another name") from error


def _record(row: dict[str, Any], path: str, line: int) -> Record:
    where = f"{path}:{line}"
    chats = [key for key in CHAT_KEYS if key in row]
    tokens = "input_ids" in row and "loss_mask" in row
    if len(chats) + tokens != 1:
        problem = "more than one kind of data in a row" if chats else "unknown shape of row"
        raise UserError(f"{where}: {problem} ({_keys(row)}); accepted: {SHAPES}")
    return _token_row(row, path, line) if tokens else _conversation(row[chats[0]], chats[0], path, line)


def _conversation(messages: Any, key: str, path: str, line: int) -> Conversation:
    where = f"{path}:{line}"
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: "{key}" must be a list of one or more messages')
    clean = []
    for i, message in enumerate(messages):
        name = f"{key}[{i}]"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            found = _keys(message) if isinstance(message, dict) else type(message).__name__
            raise UserError(
                f'{where}: {name} needs "role" and "content" (ShareGPT "from"/"value" must be renamed); found {found}'
            )
        if message["role"] not in ROLES:
            raise UserError(f"{where}: {name} has unknown role {message['role']!r}; accepted: {', '.join(ROLES)}")
        # A template may render such keys (tool_calls, reasoning_content), so dropping them would change the text.
        extra = [k for k, value in message.items() if k not in ("role", "content") and value is not None]
        if extra:
            raise UserError(
                f"{where}: {name} has keys other than role and content ({', '.join(extra)}); put it all into content"
            )
        clean.append({"role": message["role"], "content": _text(message["content"], where, f"{name} content")})
    return Conversation(clean, line, path)


def _token_row(row: dict[str, Any], path: str, line: int) -> TokenRow:
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
    return TokenRow(ids, [int(value) for value in mask], line, path)


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

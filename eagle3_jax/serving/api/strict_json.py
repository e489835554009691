"""JSON as RFC 8259 has it: Python also takes NaN, and halves of surrogate pairs, which no answer could carry."""

import json
from typing import Any


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, RecursionError for one nested too deeply."""
    value = json.loads(text, parse_constant=_refuse)
    _check_text(value, text)
    return value


def first_value(text: str, start: int = 0) -> tuple[Any, int]:
    """The value that begins at `start`, and where it ends, whatever follows. Raises as `loads` does."""
    value, end = _DECODER.raw_decode(text, start)
    _check_text(value, text[start:end])
    return value, end


def _check_text(value: Any, text: str) -> None:
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()

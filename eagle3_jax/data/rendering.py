"""A chat as text by the target's own template, that text as tokens, and the mask that turns are marked in."""

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from eagle3_jax.errors import UserError


@dataclass(frozen=True)
class ChatOptions:
    """last_turn_only: supervise the last assistant turn alone. template: variables for the chat template besides the
    messages, such as {"enable_thinking": False}; serving must use the same. date: what day it is for a template that
    writes the date; None = today.
    """

    last_turn_only: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    date: datetime.date | None = None


class Text:
    """Rendered text, its tokens, and the mask that turns are marked in."""

    def __init__(self, tokenizer: Any, text: str, where: str):
        if not tokenizer.is_fast:
            raise UserError(f"{where}: the tokenizer gives no character offsets; use a fast one (tokenizer.json)")
        encoding = encode(tokenizer, text, return_offsets_mapping=True)
        self.tokenizer, self.text = tokenizer, text
        self.ids = np.asarray(encoding["input_ids"], dtype=np.int64)
        self.offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        self.special = np.isin(self.ids, special_ids(tokenizer))
        self.mask = np.zeros(len(self.ids), dtype=bool)

    def mark(self, start: int, end: int, prompt: str, turn: str) -> None:
        """Supervises the tokens of the characters start..end-1, generated after `prompt`, with which the text begins.

        No token may lie across a border, and the tokens of the prompt must be those of the prompt alone.
        """
        first, last = self.offsets[:, 0], self.offsets[:, 1]
        for border in (start, end):
            if np.any((first < border) & (border < last)):
                raise UserError(
                    f"{turn}: one token lies across the border of the answer (character {border} of the rendered "
                    "chat), so it is partly generated and partly given; does the answer begin or end with blanks or "
                    "newlines?"
                )
        # Offsets cannot show everything: a prompt that ends in blanks may be split differently when text follows.
        head = encode(self.tokenizer, prompt)["input_ids"]
        if self.ids[: len(head)].tolist() != head:
            raise UserError(
                f"{turn}: the tokens before the answer differ from those of the prompt alone, so serving would see "
                "other ids than training; does the answer begin with blanks or newlines?"
            )
        self.mask |= (last > start) & (last <= end)


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    generation_prompt: bool,
    where: str,
    tools: list[dict[str, Any]] | None,
    options: ChatOptions,
) -> str:
    """The messages as text. Raises UserError, which begins with `where`, if there is no template or it refuses them."""
    if not tokenizer.chat_template:
        raise UserError(f"{where}: the tokenizer has no chat template; use an instruct model's, or rows of input_ids")
    if "developer" not in str(tokenizer.chat_template):  # another name of the system prompt
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=_dated(tokenizer.chat_template, options.date),
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **options.template,
        )
    # of expressions over messages and variables
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise UserError(f"{where}: the chat template refuses the messages: {' '.join(str(error).split())}") from error


def _dated(template: Any, date: datetime.date | None) -> str | None:
    """The template with a date in place of the day on which it is rendered; None, which is the tokenizer's own, where
    nobody names one."""
    if date is None or not isinstance(template, str):
        return None
    return re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", lambda call: repr(date.strftime(call[2])), template)


def encode(tokenizer: Any, text: str, **options: Any) -> Any:
    """The encoding of text that has its special tokens from the template, so that none are added."""
    # verbose=False: the length is cut when packing, a warning about the model's limit would only confuse.
    return tokenizer(text, add_special_tokens=False, verbose=False, **options)


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of all special tokens: also those, like Llama 3's <|eot_id|>, that have no name such as eos_token."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))

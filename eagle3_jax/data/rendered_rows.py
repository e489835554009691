"""Chats that were rendered elsewhere with the target's template: where in their text the answers are."""

import re
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.data.records import TextRow
from eagle3_jax.data.rendering import ChatOptions, Text, encode, render, special_ids
from eagle3_jax.errors import UserError

# Written by templates, never by the model; the latter where every answer begins with thoughts.
_EMPTY_THOUGHTS, _NO_THOUGHTS = re.compile(r"<think>\s*</think>\s*"), re.compile(r"\s*</think>\s*")


def text_document(tokenizer: Any, record: TextRow, options: ChatOptions) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of rendered text: an answer lies between the template's header and its end-of-turn token.

    Text that has no such header (another template, other line ends) has nothing supervised, which is counted.
    """
    where = record.where
    marks = _marks(tokenizer, where, options)
    if not record.text.startswith(marks.begin):
        raise UserError(
            f"{where}: the text does not begin with {marks.begin!r}, with which every prompt begins when served"
        )
    whole, spans = Text(tokenizer, record.text, where), []
    # The end-of-turn token is the model's, whatever else follows an answer is not.
    ends = [
        (int(first), int(last) if token == marks.end else int(first))
        for token, (first, last) in zip(whole.ids.tolist(), whole.offsets, strict=True)
        if token in marks.after
    ]
    empty_thoughts = _NO_THOUGHTS if marks.header.rstrip().endswith("<think>") else _EMPTY_THOUGHTS
    place = record.text.find(marks.header)
    while place >= 0:
        start = place + len(marks.header)
        if (empty := empty_thoughts.match(record.text, start)) is not None:
            start = empty.end()
        end = next((end for first, end in ends if first >= start), len(record.text))  # the latter of a cut answer
        spans.append((start, end))
        place = record.text.find(marks.header, end)
    for start, end in spans[-1:] if options.last_turn_only else spans:
        whole.mark(start, end, record.text[:start], where)
    return whole.ids, whole.mask


class _Marks(NamedTuple):
    """Of a chat template: the text before an answer, the text a chat begins with, the token that ends an answer (None:
    it writes none), and the special tokens of which one comes after an answer: that one, those of the next turn."""

    header: str
    begin: str
    end: int | None
    after: frozenset[int]


def _marks(tokenizer: Any, where: str, options: ChatOptions) -> _Marks:
    question, answer, next_question = "QUESTION", "ANSWER", "FOLLOWING"
    contents = {"user": question, "assistant": answer}
    chat = [{"role": role, "content": content} for role, content in contents.items()]
    chat.append({"role": "user", "content": next_question})

    def rendered(count: int, generation: bool) -> str:
        return render(tokenizer, chat[:count], generation, where, None, options)

    without, prompt, whole, longer = rendered(1, False), rendered(1, True), rendered(2, False), rendered(3, False)
    # Templates that always, or never, write the header: all that stands between question and answer.
    added = prompt.removeprefix(without) if prompt.startswith(without) else ""
    header = added or prompt.partition(question)[2]
    if not header.strip() or question not in prompt or answer not in whole:
        raise UserError(f"{where}: the chat template writes nothing before an answer; use rows of conversations")
    special = frozenset(special_ids(tokenizer))

    def first_special(text: str) -> int | None:
        return next((i for i in encode(tokenizer, text)["input_ids"] if i in special), None)

    end = first_special(whole.partition(answer)[2])
    later = first_special(longer.partition(answer)[2].partition(next_question)[0])
    if later is None:
        raise UserError(
            f"{where}: the chat template writes no special token after an answer, so text does not show where one "
            "ends; use rows of conversations"
        )
    bos = tokenizer.bos_token or ""
    after = special if end is None else frozenset((end, later, first_special(header)))
    return _Marks(header, bos if prompt.startswith(bos) else "", end, after)

"""Records to token ids and a loss mask that marks what the model itself generated.

The mask is measured against what a server does, not against patterns in the text: for each assistant turn the chat
template is asked for the prompt a server would send (`add_generation_prompt=True`), and supervision starts where that
prompt ends. A turn that the rendering of the whole chat does not show as it was generated (templates that drop earlier
thoughts, or move the system prompt) gets a document of its own, which ends with it. Anything that would make training
and serving see different ids is an error that names the row.
"""

import datetime
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from eagle3_jax.data.records import THOUGHTS, Conversation, Record, TextRow, TokenRow
from eagle3_jax.errors import UserError

Document = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ChatOptions:
    """last_turn_only: supervise the last assistant turn alone. template: variables for the chat template besides the
    messages, such as {"enable_thinking": False}; serving must use the same. date: what day it is for a template that
    writes the date; None = today.
    """

    last_turn_only: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    date: datetime.date | None = None


DEFAULT = ChatOptions()


def tokenise(tokenizer: Any, record: Record, vocab_size: int, options: ChatOptions = DEFAULT) -> list[Document]:
    """Returns the documents (ids int32[T], mask bool[T]) of one record: one, or one for each turn that needs its own.

    `tokenizer` is a fast transformers tokenizer with a chat template (unused, may be None, for a TokenRow);
    `vocab_size` is the number of rows of the target's head. Mask of a conversation: in every assistant turn its
    thoughts, content, tool calls and the end-of-turn token; not the header, not template text the model did not write,
    not the newline after the end-of-turn token. Raises UserError, naming the row, for ids outside 0..vocab_size-1, a
    template that fails or changes answers, and token boundaries that do not fall on the border of a turn.
    """
    if isinstance(record, TokenRow):
        documents = [(np.asarray(record.input_ids), np.asarray(record.loss_mask, dtype=bool))]
    elif isinstance(record, TextRow):
        documents = [_text_document(tokenizer, record, options)]
    else:
        documents = _conversation(tokenizer, record, options)
    for ids, _ in documents:
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            raise UserError(
                f"{record.where}: token id {ids[outside[0]]} at position {outside[0]} is outside 0..{vocab_size - 1}; "
                "was it tokenised for another target?"
            )
    return [(ids.astype(np.int32), mask) for ids, mask in documents]


def check_variables(tokenizer: Any, options: ChatOptions) -> None:
    """UserError for a variable that the tokenizer's chat template does not have, and would ignore without a word, or
    that is set in other ways."""
    template, taken = str(tokenizer.chat_template or ""), inspect.signature(tokenizer.apply_chat_template).parameters
    names = [name for name in options.template if name not in taken and name != "messages"]
    known = [name for name in names if re.search(rf"\b{re.escape(name)}\b", template)]
    if unknown := [name for name in options.template if name not in known]:
        raise UserError(
            f"chat_template: the target's chat template has no variable {', '.join(unknown)} / leave it out"
        )


def prompt_ids(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    where: str = "chat",
    tools: list[dict[str, Any]] | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Returns the ids a server feeds the model for `messages`: rendered with the generation prompt, then tokenised.

    Special tokens come from the template alone, so that there is exactly one BOS. tools, template: what the chat
    template is given besides. Raises UserError (prefixed with `where`) if the tokenizer has no chat template or the
    template refuses the messages.
    """
    return _encode(tokenizer, _render(tokenizer, messages, True, where, tools, ChatOptions(template=template or {})))[
        "input_ids"
    ]


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text to go on with, special tokens added as the tokenizer does it.

    A text that brings the BOS along, as a rendered template does, has one and not two; an EOS that the tokenizer puts
    at the end is left out, since after it there would be nothing to go on with.
    """
    ids = tokenizer(text, verbose=False)["input_ids"]
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    ends = getattr(tokenizer, "add_eos_token", False) and ids[-1:] == [tokenizer.eos_token_id]
    return ids[:-1] if ends else ids


class _Text:
    """Rendered text, its tokens, and the mask that turns are marked in."""

    def __init__(self, tokenizer: Any, text: str, where: str):
        if not tokenizer.is_fast:
            raise UserError(f"{where}: the tokenizer gives no character offsets; use a fast one (tokenizer.json)")
        encoding = _encode(tokenizer, text, return_offsets_mapping=True)
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
        head = _encode(self.tokenizer, prompt)["input_ids"]
        if self.ids[: len(head)].tolist() != head:
            raise UserError(
                f"{turn}: the tokens before the answer differ from those of the prompt alone, so serving would see "
                "other ids than training; does the answer begin with blanks or newlines?"
            )
        self.mask |= (last > start) & (last <= end)


def _conversation(tokenizer: Any, record: Conversation, options: ChatOptions) -> list[Document]:
    messages = record.messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts = [_Text(tokenizer, _rendered(tokenizer, record, len(messages), False, options), record.where)]
    for i in reversed(turns[-1:] if options.last_turn_only else turns):
        if not any(_try(_mark_turn, text, record, i, options) for text in texts):
            own = _Text(tokenizer, _ending_with(tokenizer, record, i, options), record.where)
            _mark_turn(own, record, i, options)
            texts.append(own)
    kept = [text for text in texts if text.mask.any()] or texts
    return [(text.ids, text.mask) for text in reversed(kept)]


def _ending_with(tokenizer: Any, record: Conversation, i: int, options: ChatOptions) -> str:
    """The text of a chat that ends with assistant message i: what a server sends, then what the model generated."""
    own = _rendered(tokenizer, record, i + 1, False, options)
    prompt = _rendered(tokenizer, record, i, True, options) if i else ""
    if own.startswith(prompt):
        return own
    # Some templates write the system prompt into the newest message, so that answering moves it: the answer is then
    # what follows the newest message and the header.
    newest = record.messages[i - 1]["content"].strip()
    header = prompt[prompt.rfind(newest) :] if newest and newest in prompt else prompt
    _, found, answer = own.rpartition(header)
    return prompt + answer if found and header.strip() else own


def _try(action, *arguments) -> bool:
    try:
        action(*arguments)
    except UserError:
        return False
    return True


def _mark_turn(whole: _Text, record: Conversation, i: int, options: ChatOptions) -> None:
    """Marks assistant message i in a rendering of the chat that contains it; UserError if that cannot be right."""
    turn, message, text = f"{record.where}, message {i}", record.messages[i], whole.text
    prompt = _prompt(whole.tokenizer, record, i, text, turn, options)
    own = _ending_with(whole.tokenizer, record, i, options).rstrip()
    parts = _parts(message)
    special = whole.offsets[whole.special][:, 0]
    if len(parts) > 1 or "tool_calls" in message:
        start, body_end = _structured_answer(text, len(prompt), own, parts, special, turn)
    else:
        start, body_end = _answer(text, len(prompt), own, parts[0], special, turn)
    if "tool_calls" in message:
        _require_calls(whole.tokenizer, record, i, turn, options)
        if not text.startswith(own):
            raise UserError(f"{turn}: the chat template renders these tool calls in another way once the chat goes on")
        end = len(own)
    else:
        end = _first_end(whole, start, body_end, _end_of_turn(whole, own[len(prompt) :], body_end, turn))
    whole.mark(start, end, prompt, turn)


def _prompt(tokenizer: Any, record: Conversation, i: int, text: str, turn: str, options: ChatOptions) -> str:
    """The text a server would send before turn i; it must be how the whole chat begins."""
    if i == 0:
        raise UserError(f"{turn}: the conversation begins with an assistant turn, which answers no prompt; remove it")
    prompt = _rendered(tokenizer, record, i, True, options)
    if not text.startswith(prompt):
        raise UserError(
            f"{turn}: the chat template rewrites history: the prompt before this turn is not how the chat that ends "
            "with it begins, so no mask is right; use another template, or rows of text or input_ids"
        )
    return prompt


def _parts(message: dict[str, Any]) -> list[str]:
    """What must be in the rendering of an answer, in order: thoughts, if there are any, and content."""
    thoughts = list(dict.fromkeys(message[key].strip() for key in THOUGHTS if key in message))
    content = message["content"]
    if not thoughts and "</think>" in content:
        before, _, content = content.partition("</think>")
        thoughts = [before.strip().removeprefix("<think>").strip()]
    return [*thoughts, content.strip()]


def _structured_answer(
    text: str, start: int, own: str, parts: list[str], special: np.ndarray, turn: str
) -> tuple[int, int]:
    """Character range of thoughts and content, with the tags that the template writes between them.

    own: the chat rendered up to this turn; the turn must read the same in `text`. special: where special tokens begin
    in `text`.
    """
    place = start
    for part in parts:
        found = own.find(part, place)
        if found < 0:
            raise UserError(
                f"{turn}: the chat template does not render the answer as it stands ({part[:40]!r} is missing), "
                "so what the model generated cannot be marked; use rows of text or input_ids"
            )
        place = found + len(part)
    if not text.startswith(own[:place]):
        raise UserError(f"{turn}: the chat template renders this turn in another way once the chat goes on")
    # The template may write the same words before the content ("final" of gpt-oss): that reaches up to a special token.
    common = len(os.path.commonprefix([text, own]))
    before = (text[:stop].rstrip() for stop in special.tolist() if place <= stop <= common)
    return start, max([place, *(len(part) for part in before if part.endswith(parts[-1]))])


def _answer(text: str, start: int, own: str, body: str, special: np.ndarray, turn: str) -> tuple[int, int]:
    """Character range of the answer, which the template may have trimmed or preceded with text of its own.

    own: the chat rendered up to this turn. special: where special tokens begin in `text`.
    """
    skipped = len(text) - start - len(text[start:].lstrip())
    # Blanks between prompt and answer are the model's (" answer" after "[/INST]"), so the range begins before them.
    if body and text.startswith(body, start + skipped):
        return start, start + skipped + len(body)
    # Otherwise the turn reaches up to a special token: the next one, or, where the template writes some before the
    # content (gpt-oss's channels), the last one of the turn. Text of the template ("<think></think>") that is not part
    # of the generation prompt may come first: no model wrote it, so only the content after it is supervised.
    following, common = special[special >= start], len(os.path.commonprefix([text, own]))
    stops = [*following[:1].tolist(), *(stop for stop in following[1:].tolist() if stop <= common)] or [len(text)]
    rendered = [text[start:stop].rstrip() for stop in stops]
    ending = next((part for part in reversed(rendered) if part.endswith(body)), None)
    if ending is None or (not body and not len(following)):
        raise UserError(
            f"{turn}: the chat template does not render the answer as it stands (found {rendered[0][:60]!r}), "
            "so what the model generated cannot be marked; change the data or use another template"
        )
    if not body:
        return (stops[0], stops[0]) if rendered[0] else (start, start)
    return start + len(ending) - len(body), start + len(ending)


def _end_of_turn(whole: _Text, own: str, body_end: int, turn: str) -> int:
    """Character position after the end-of-turn token, or `body_end` if the template writes none for this turn.

    own: the turn as it is rendered if the chat ends with it.
    """
    text, offsets = whole.text, whole.offsets
    found = np.flatnonzero(whole.special & (offsets[:, 1] > body_end))
    stop = int(offsets[found[0], 0]) if found.size else len(text)
    if text[body_end:stop].strip():
        raise UserError(
            f"{turn}: no end-of-turn token after the answer (found {text[body_end : body_end + 40]!r}); "
            "is it marked special in the tokenizer?"
        )
    # The next header may be a special token too: the end-of-turn token is there even if the chat ends with this turn.
    if not found.size or whole.tokenizer.convert_ids_to_tokens(int(whole.ids[found[0]])) not in own:
        return body_end
    return int(offsets[found[0], 1])


def _first_end(whole: _Text, start: int, body_end: int, end: int) -> int:
    """`end`, or the end of the same end-of-turn token within the answer, where the model stopped: data that was
    decoded with its special tokens has it twice."""
    first, last = whole.offsets[:, 0], whole.offsets[:, 1]
    token = whole.ids[(last == end) & (first >= body_end)]
    inner = last[np.isin(whole.ids, token) & (first >= start) & (last <= body_end)]
    return int(inner[0]) if inner.size else end


def _require_calls(tokenizer: Any, record: Conversation, i: int, turn: str, options: ChatOptions) -> None:
    """UserError if the chat template leaves out the tool calls of message i, which the model generated."""
    plain = {key: value for key, value in record.messages[i].items() if key != "tool_calls"}
    without = replace(record, messages=[*record.messages[:i], plain])
    if _rendered(tokenizer, without, i + 1, False, options) == _rendered(tokenizer, record, i + 1, False, options):
        raise UserError(
            f"{turn}: the chat template leaves out tool calls, so what the model generated is not in the text; use "
            "another template, or rows of text or input_ids"
        )


# Written by templates, never by the model; the latter where every answer begins with thoughts.
_EMPTY_THOUGHTS, _NO_THOUGHTS = re.compile(r"<think>\s*</think>\s*"), re.compile(r"\s*</think>\s*")


def _text_document(tokenizer: Any, record: TextRow, options: ChatOptions) -> Document:
    """Ids and mask of rendered text: an answer lies between the template's header and its end-of-turn token.

    Text that has no such header (another template, other line ends) has nothing supervised, which is counted.
    """
    where = record.where
    marks = _marks(tokenizer, where, options)
    if not record.text.startswith(marks.begin):
        raise UserError(
            f"{where}: the text does not begin with {marks.begin!r}, with which every prompt begins when served"
        )
    whole, spans = _Text(tokenizer, record.text, where), []
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
        return _render(tokenizer, chat[:count], generation, where, None, options)

    without, prompt, whole, longer = rendered(1, False), rendered(1, True), rendered(2, False), rendered(3, False)
    # Templates that always, or never, write the header: all that stands between question and answer.
    added = prompt.removeprefix(without) if prompt.startswith(without) else ""
    header = added or prompt.partition(question)[2]
    if not header.strip() or question not in prompt or answer not in whole:
        raise UserError(f"{where}: the chat template writes nothing before an answer; use rows of conversations")
    special = frozenset(special_ids(tokenizer))

    def first_special(text: str) -> int | None:
        return next((i for i in _encode(tokenizer, text)["input_ids"] if i in special), None)

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


def _rendered(tokenizer: Any, record: Conversation, count: int, generation_prompt: bool, options: ChatOptions) -> str:
    """The first `count` messages of a conversation as text."""
    messages = record.messages[:count]
    return _render(tokenizer, messages, generation_prompt, record.where, record.tools, options)


def _render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    generation_prompt: bool,
    where: str,
    tools: list[dict[str, Any]] | None,
    options: ChatOptions,
) -> str:
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


def _encode(tokenizer: Any, text: str, **options: Any) -> Any:
    # verbose=False: the length is cut when packing, a warning about the model's limit would only confuse.
    return tokenizer(text, add_special_tokens=False, verbose=False, **options)


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of all special tokens: also those, like Llama 3's <|eot_id|>, that have no name such as eos_token."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))

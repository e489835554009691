"""Records to token ids and a loss mask that marks what the model itself generated.

The mask is measured against what a server does, not against patterns in the text: for each assistant turn the chat
template is asked for the prompt a server would send (`add_generation_prompt=True`), and supervision starts where that
prompt ends. A turn that the rendering of the whole chat does not show as it was generated (templates that drop earlier
thoughts, or move the system prompt) gets a document of its own, which ends with it. Anything that would make training
and serving see different ids is an error that names the row.
"""

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eagle3_jax.data.records import THOUGHTS, Conversation, Record, TextRow, TokenRow
from eagle3_jax.data.rendered_rows import text_document
from eagle3_jax.data.rendering import ChatOptions, Text, encode, render
from eagle3_jax.errors import UserError

Document = tuple[np.ndarray, np.ndarray]
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
        documents = [text_document(tokenizer, record, options)]
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
    return encode(tokenizer, render(tokenizer, messages, True, where, tools, ChatOptions(template=template or {})))[
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


def _conversation(tokenizer: Any, record: Conversation, options: ChatOptions) -> list[Document]:
    messages = record.messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts = [Text(tokenizer, _rendered(tokenizer, record, len(messages), False, options), record.where)]
    for i in reversed(turns[-1:] if options.last_turn_only else turns):
        if not any(_try(_mark_turn, text, record, i, options) for text in texts):
            own = Text(tokenizer, _ending_with(tokenizer, record, i, options), record.where)
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


def _mark_turn(whole: Text, record: Conversation, i: int, options: ChatOptions) -> None:
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


def _end_of_turn(whole: Text, own: str, body_end: int, turn: str) -> int:
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


def _first_end(whole: Text, start: int, body_end: int, end: int) -> int:
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


def _rendered(tokenizer: Any, record: Conversation, count: int, generation_prompt: bool, options: ChatOptions) -> str:
    """The first `count` messages of a conversation as text."""
    messages = record.messages[:count]
    return render(tokenizer, messages, generation_prompt, record.where, record.tools, options)

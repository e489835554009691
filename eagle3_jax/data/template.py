"""Records to token ids and a loss mask that marks what the model itself generated.

The mask is measured against what a server does, not against patterns in the text: for each assistant turn the chat
template is asked for the prompt a server would send (`add_generation_prompt=True`), and supervision starts where that
prompt ends. Anything that would make training and serving see different ids is an error that names the row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from eagle3_jax.data.records import Conversation, Record, TokenRow
from eagle3_jax.errors import UserError

Document = tuple[np.ndarray, np.ndarray]


def tokenise(tokenizer: Any, record: Record, vocab_size: int) -> Document:
    """Returns (ids int32[T], mask bool[T]) of one record.

    `tokenizer` is a fast transformers tokenizer with a chat template (unused, may be None, for a TokenRow);
    `vocab_size` is the number of rows of the target's head. Mask of a conversation: in every assistant turn the
    content and the end-of-turn token; not the header, not template text the model did not write, not the newline
    after the end-of-turn token. Raises UserError, naming the row, for ids outside 0..vocab_size-1, a template that
    fails or rewrites history or answers, and token boundaries that do not fall on the border of a turn.
    """
    if isinstance(record, TokenRow):
        ids, mask = np.asarray(record.input_ids), np.asarray(record.loss_mask, dtype=bool)
    else:
        ids, mask = _conversation(tokenizer, record)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        raise UserError(
            f"{record.where}: token id {ids[outside[0]]} at position {outside[0]} is outside 0..{vocab_size - 1}; "
            "was it tokenised for another target?"
        )
    return ids.astype(np.int32), mask


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], where: str = "chat", **template: Any) -> list[int]:
    """Returns the ids a server feeds the model for `messages`: rendered with the generation prompt, then tokenised.

    Special tokens come from the template alone, so that there is exactly one BOS. template: what else the template
    takes, as `tools`. Raises UserError (prefixed with `where`) if the tokenizer has no chat template or the template
    refuses the messages.
    """
    return _encode(tokenizer, _render(tokenizer, messages, True, where, **template))["input_ids"]


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


def _conversation(tokenizer: Any, record: Conversation) -> Document:
    where, messages = record.where, record.messages
    if not tokenizer.is_fast:
        raise UserError(f"{where}: the tokenizer gives no character offsets; use a fast one (tokenizer.json)")
    text = _render(tokenizer, messages, False, where)
    encoding = _encode(tokenizer, text, return_offsets_mapping=True)
    ids = np.asarray(encoding["input_ids"], dtype=np.int64)
    offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    special = np.isin(ids, special_ids(tokenizer))
    mask = np.zeros(len(ids), dtype=bool)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = f"{where}, message {i}"
        prompt = _prompt(tokenizer, messages[:i], text, turn)
        start, body_end = _answer(text, len(prompt), message["content"], offsets[special], turn)
        end = _end_of_turn(tokenizer, messages[: i + 1], text, body_end, ids, offsets, special, turn)
        mask |= _inside(offsets, start, end, turn)
        # Offsets cannot show everything: a prompt that ends in blanks may be split differently when text follows.
        head = _encode(tokenizer, prompt)["input_ids"]
        if ids[: len(head)].tolist() != head:
            raise UserError(
                f"{turn}: the tokens before the answer differ from those of the prompt alone, so serving would see "
                "other ids than training; does the answer begin with blanks or newlines?"
            )
    return ids, mask


def _prompt(tokenizer: Any, history: list[dict[str, str]], text: str, turn: str) -> str:
    """The text a server would send before this turn; it must be how the whole chat begins."""
    if not history:
        raise UserError(f"{turn}: the conversation begins with an assistant turn, which answers no prompt; remove it")
    prompt = _render(tokenizer, history, True, turn)
    if not text.startswith(prompt):
        raise UserError(
            f"{turn}: the chat template rewrites history: the prompt before this turn is not how the whole chat "
            "begins, so no mask over the whole chat is right; make one row of each turn, or use another template"
        )
    return prompt


def _answer(text: str, start: int, content: str, special: np.ndarray, turn: str) -> tuple[int, int]:
    """Character range of the answer, which the template may have trimmed or preceded with text of its own."""
    body = content.strip()
    skipped = len(text) - start - len(text[start:].lstrip())
    # Blanks between prompt and answer are the model's (" answer" after "[/INST]"), so the range begins before them.
    if body and text.startswith(body, start + skipped):
        return start, start + skipped + len(body)
    # Otherwise the turn reaches up to the next special token. Text of the template ("<think></think>") that is not
    # part of the generation prompt may come first: no model wrote it, so only the content after it is supervised.
    following = special[special[:, 0] >= start]
    stop = int(following[0, 0]) if len(following) else len(text)
    rendered = text[start:stop].rstrip()
    if not rendered.endswith(body) or (not body and not len(following)):
        raise UserError(
            f"{turn}: the chat template does not render the answer as it stands (found {rendered[:60]!r}), "
            "so what the model generated cannot be marked; change the data or use another template"
        )
    if not body:
        return (stop, stop) if rendered else (start, start)
    return start + len(rendered) - len(body), start + len(rendered)


def _end_of_turn(
    tokenizer: Any,
    history: list[dict[str, str]],
    text: str,
    body_end: int,
    ids: np.ndarray,
    offsets: np.ndarray,
    special: np.ndarray,
    turn: str,
) -> int:
    """Character position after the end-of-turn token, or `body_end` if the template writes none for this turn."""
    found = np.flatnonzero(special & (offsets[:, 1] > body_end))
    stop = int(offsets[found[0], 0]) if found.size else len(text)
    if text[body_end:stop].strip():
        raise UserError(
            f"{turn}: no end-of-turn token after the answer (found {text[body_end : body_end + 40]!r}); "
            "is it marked special in the tokenizer?"
        )
    # The next header may be a special token too: the end-of-turn token is the one the turn itself closes with.
    own = _render(tokenizer, history, False, turn).rstrip()
    if not found.size or not own.endswith(tokenizer.convert_ids_to_tokens(int(ids[found[0]]))):
        return body_end
    return int(offsets[found[0], 1])


def _inside(offsets: np.ndarray, start: int, end: int, turn: str) -> np.ndarray:
    """bool[T]: tokens of the characters start..end-1. No token may lie across a border."""
    first, last = offsets[:, 0], offsets[:, 1]
    for border in (start, end):
        if np.any((first < border) & (border < last)):
            raise UserError(
                f"{turn}: one token lies across the border of the answer (character {border} of the rendered chat), "
                "so it is partly generated and partly given; does the answer begin or end with blanks or newlines?"
            )
    return (last > start) & (last <= end)


def _render(
    tokenizer: Any, messages: Sequence[dict[str, Any]], generation_prompt: bool, where: str, **template: Any
) -> str:
    if not tokenizer.chat_template:
        raise UserError(f"{where}: the tokenizer has no chat template; use an instruct model's, or rows of input_ids")
    try:
        options = {"tokenize": False, "add_generation_prompt": generation_prompt, **template}
        return tokenizer.apply_chat_template(list(messages), **options)
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise UserError(f"{where}: the chat template refuses the messages: {' '.join(str(error).split())}") from error


def _encode(tokenizer: Any, text: str, **options: Any) -> Any:
    # verbose=False: the length is cut when packing, a warning about the model's limit would only confuse.
    return tokenizer(text, add_special_tokens=False, verbose=False, **options)


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of all special tokens: also those, like Llama 3's <|eot_id|>, that have no name such as eos_token."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))

"""`eagle3 data preview`: training data as the trainer sees it, after template, mask and packing."""

import dataclasses
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.cli.common import (
    DTypeOption,
    JsonOption,
    TargetOption,
    TemplateOption,
    note,
    open_target,
    template_variables,
    write_json,
)

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

OPEN, CLOSE = "⟦", "⟧"


def preview_data(
    file: Annotated[str, typer.Argument(help="Conversations, token rows or text: JSONL, JSON, Parquet, hf:NAME.")],
    target: TargetOption,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a packed row, as data.length of a config.")] = 2048,
    rows: Annotated[int, typer.Option(min=0, help="Packed rows to show; 0 = counts only.")] = 1,
    last_turn_only: Annotated[bool, typer.Option("--last-turn-only", help="As data.last_turn_only.")] = False,
    chat_template: TemplateOption = "{}",
    loss_masks: Annotated[
        str | None, typer.Option(help="Masks of stored features that have none, as data.stored.loss_masks.")
    ] = None,
    dtype: DTypeOption = "bfloat16",
    json_file: JsonOption = None,
) -> None:
    """Show packed rows: supervised tokens in green (between ⟦ and ⟧ where there are no colours), documents apart."""
    variables = template_variables(chat_template)
    loaded = open_target(target, dtype)
    from eagle3_jax.data.template import ChatOptions
    from eagle3_jax.training.dataset import pack_documents, read_documents

    documents = read_documents(file, loaded, loss_masks, ChatOptions(last_turn_only, variables))
    packed = pack_documents(documents.items, length, file)
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    for row in range(min(rows, len(packed.input_ids))):
        numbers = packed.document_ids[row]
        filled, members = int((numbers >= 0).sum()), packed.members[row]
        console.rule(f"row {row}: {len(members)} documents, {filled} of {length} tokens", align="left", style="bold")
        for number, member in enumerate(members):
            inside = numbers == number
            ids, mask = packed.input_ids[row, inside], packed.loss_mask[row, inside]
            cut = len(documents.items[member][0]) - len(ids)
            header = f"document {member}: {len(ids)} tokens, {int(mask.sum())} supervised" + f", {cut} cut off" * (
                cut > 0
            )
            console.print(f"--- {header} ---", style="bold")
            console.print(_text(loaded.tokenizer, ids, mask, brackets=not console.is_terminal))
    report = packed.report
    counts = dataclasses.asdict(report) | {
        "tokens": int((packed.document_ids >= 0).sum()),
        "refused": documents.refused,
        "first_refusal": documents.first_refusal,
        "duplicates": documents.duplicates,
    }
    note(
        f"{report.documents} documents in {report.rows} rows of {length} ({report.fill_rate:.0%} full), "
        f"{report.supervised_tokens} of {counts['tokens']} tokens supervised; {report.cut_documents} documents cut, "
        f"{report.dropped_documents} with nothing supervised, {documents.words()}"
    )
    write_json(json_file, counts)


def _text(tokenizer: Any, ids: "np.ndarray", mask: "np.ndarray", brackets: bool) -> "Text":
    """The tokens in runs of equal mask; without a tokenizer their ids."""
    from rich.text import Text

    text = Text()
    for supervised, run in groupby(zip(mask.tolist(), ids.tolist(), strict=True), key=lambda pair: pair[0]):
        tokens = [token for _, token in run]
        if tokenizer is None:
            words = " ".join(map(str, tokens))
        else:
            words = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if supervised:
            text.append(f"{OPEN}{words}{CLOSE}" if brackets else words, style="green")
        else:
            text.append(words, style="dim")
        if tokenizer is None:
            text.append(" ")
    return text

"""`eagle3 data features`: run the target over data once and store its states."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from eagle3_jax.cli.common import (
    DTypeOption,
    JsonOption,
    QuantizeOption,
    TargetOption,
    TemplateOption,
    note,
    open_target,
    tap_set,
    template_variables,
    write_json,
)
from eagle3_jax.errors import UserError


def store_features(
    files: Annotated[list[str], typer.Argument(help="Data as for training: JSONL, JSON, Parquet, hf:NAME.")],
    target: TargetOption,
    out: Annotated[Path, typer.Option(help="Folder of the store; continued if it is there.")],
    taps: Annotated[str, typer.Option(help="Canonical points, as 2,15,27, or `paper`.")] = "paper",
    store_dtype: Annotated[
        Literal["bfloat16", "int8"], typer.Option(help="int8: half the disk, one scale for each token and state.")
    ] = "bfloat16",
    length: Annotated[int, typer.Option(min=8, help="Tokens a document is cut at, as data.length of a config.")] = 2048,
    batch_rows: Annotated[int, typer.Option(min=1, help="Packed rows that the target reads together.")] = 4,
    last_turn_only: Annotated[bool, typer.Option("--last-turn-only", help="As data.last_turn_only.")] = False,
    chat_template: TemplateOption = "{}",
    dtype: DTypeOption = "bfloat16",
    quantize: QuantizeOption = None,
    json_file: JsonOption = None,
) -> None:
    """Store the target's states, to train from with data.train=OUT. Prints the disk it takes first."""
    variables = template_variables(chat_template)
    given = None if taps == "paper" else tap_set(taps)
    loaded = open_target(target, dtype, quantize)
    from eagle3_jax.data.template import ChatOptions
    from eagle3_jax.taps import paper_taps
    from eagle3_jax.training.dataset import read_documents
    from eagle3_jax.training.make_store import begun_on, make_store

    points = paper_taps(loaded.num_layers) if given is None else given
    date = begun_on(out)
    documents = read_documents(files, loaded, options=ChatOptions(last_turn_only, variables, date))
    if documents.samples is not None:
        raise UserError(f"these are stored features already / {', '.join(files)} / train from them as they are")
    note(f"{len(documents.items)} documents, {documents.words()}")

    def progress(done: int, total: int) -> None:
        note(f"shard {done} of {total}")

    says = {"template": variables, "date": date, "progress": progress, "say": note}
    index = make_store(loaded, documents.items, points, out, store_dtype, length, batch_rows, **says)
    note(f"store written to {out} / train from it with data.train={out}")
    lengths = [length for shard in index["shards"] for length in shard["lengths"]]
    write_json(json_file, index | {"shards": len(index["shards"]), "tokens": sum(lengths)})

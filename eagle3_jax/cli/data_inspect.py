"""`eagle3 data inspect`: what is in a file of training data or of stored features."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3_jax.cli.common import DTypeOption, JsonOption, QuantizeOption, note, open_target, start_jax, write_json


def inspect_data(
    file: Annotated[
        Path,
        typer.Argument(
            help="A sample of speculators, SpecForge or ModelOpt, or a folder of them; or JSONL, JSON or Parquet."
        ),
    ],
    target: Annotated[
        str | None, typer.Option("--target", help="The model they were made with: measures what each state is.")
    ] = None,
    dtype: DTypeOption = "bfloat16",
    quantize: QuantizeOption = None,
    json_file: JsonOption = None,
) -> None:
    """Print what stored features hold: norms of each state and whether it looks like embedding, early, middle, late
    or post-norm; with --target, which state of the model it is. Of other training data, count what is in it.
    """
    if _is_rows(file):
        _count(file, json_file)
        return
    from eagle3_jax.data import foreign
    from eagle3_jax.data.foreign.inspection import inspect_features

    foreign.open_sample(foreign.sample_files(file)[0])  # faults come before the model is loaded
    if target is None:
        start_jax(dtype)
    found = inspect_features(file, None if target is None else open_target(target, dtype, quantize))
    _print(found)
    if target is None:
        note("looks are guesses from norms unless marked certain; --target TARGET measures what each state is")
    elif found["stored"] is None:
        note("not to be trained from: a state is like none of this target, or none is its last hidden state")
    else:
        print(f"config: data.stored: {json.dumps(found['stored'])}")
    write_json(json_file, found)


def _is_rows(file: Path) -> bool:
    return file.is_file() and Path(file.name.removesuffix(".gz")).suffix in (".jsonl", ".json", ".parquet")


def _count(file: Path, json_file: Path | None) -> None:
    from eagle3_jax.data.records import counts

    found = counts(file)
    print(f"{file}: " + ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in found.items() if number))
    note(f"how it is tokenised and supervised: eagle3 data preview {shlex.quote(str(file))} --target TARGET")
    write_json(json_file, found)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    mask = "no loss mask in it" if found["supervised"] is None else f"{found['supervised']} supervised"
    files = f"{found['inspected']} of {found['files']} files, " if found["files"] > 1 else ""
    said = ", ".join(
        f"{key} {value}" for key, value in found["says"].items() if value not in (None, "") and key != "where"
    )
    print(f"{found['file']}: {found['format']}")
    print(f"{files}{found['tokens']} tokens, {mask}; states are {found['hidden_size']} wide")
    print(f"it says: {said} ({found['says']['where']})" if said else "it does not say which states these are")
    table = Table("state", "dtype", "rms", "spread", "peak", "looks like", *(["is", "distance"] * _measured(found)))
    for state in found["states"]:
        like = state["looks_like"] + (" (certain)" if state["certain"] else "")
        numbers = [f"{state[key]:.3g}" for key in ("rms", "spread", "peak")]
        row = [state["name"], state["dtype"], *numbers, like]
        if state["measured"] is not None:
            measured = state["measured"]
            row += [measured["words"], f"{measured['distance']:.3f} (next {measured['second']:.3f})"]
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    Console(width=None if Console().is_terminal else 160).print(table)


def _measured(found: dict[str, Any]) -> bool:
    return found["states"][0]["measured"] is not None

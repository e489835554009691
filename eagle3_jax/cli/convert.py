"""`eagle3 convert` and `eagle3 inspect` (also `python -m convert`): drafts from and to other systems' formats."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.cli.common import JsonOption, note, tap_set, write_json
from eagle3_jax.errors import UserError

if TYPE_CHECKING:
    from convert.target import TargetFacts
    from eagle3_jax.draft.draft import Draft
    from eagle3_jax.taps import TapSet

TapsOption = Annotated[
    str | None,
    typer.Option("--taps", help="Taps that the file does not name, as block inputs in order, for example 2,15,27."),
]
ConventionOption = Annotated[
    Literal["block-input", "block-output"] | None,
    typer.Option("--convention", help="How the ids in the source count, where systems read them differently."),
]
TargetFactsOption = Annotated[
    str | None, typer.Option("--target", help="The target, to check sizes, taps and embedding against.")
]


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Draft folder or hub name, in any known format.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[
        Literal["speculators", "sglang", "safeailab", "modelopt"],
        typer.Option("--to", help="sglang is also what sglang-jax and tpu-inference read."),
    ],
    taps: TapsOption = None,
    convention: ConventionOption = None,
    target: TargetFactsOption = None,
    sglang_rule: Annotated[
        Literal["always", "first-is-1"] | None,
        typer.Option(
            "--sglang-rule",
            help="With --to sglang: whether the server adds one to every id (older) or only where the first is 1.",
        ),
    ] = None,
    print_serve: Annotated[
        bool, typer.Option("--print-serve", help="Print the command that serves the result.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Convert a draft to another system's format, every tensor bit for bit. `python -m convert inspect SRC` looks only.

    What the destination cannot express is refused by name; a failed conversion leaves no folder.
    """
    from convert.detect import FORMATS, detect
    from convert.inspection import inspect, not_finite, notes_on, render
    from convert.servers import Folder
    from eagle3_jax.draft.draft import assemble, checkpoint_of, refuse_unset_map
    from eagle3_jax.draft.folder import check_destination, read_folder, write_folder
    from eagle3_jax.models.target import resolve

    if sglang_rule is not None and to != "sglang":
        raise UserError("--sglang-rule says how SGLang reads ids / it goes with --to sglang only")
    facts = _target(target)
    place = resolve(source, also=("pytorch_model*.bin",))
    check_destination(destination, place)
    raw, stored = read_folder(place)
    layout = detect(raw, stored, str(place))
    if broken := not_finite(stored):
        raise UserError(
            f"{broken[0]} holds NaN or infinity / {place} / take a checkpoint from before training diverged"
        )
    checkpoint = checkpoint_of(raw, stored, place, _taps(taps), convention, facts.num_layers if facts else None)
    refuse_unset_map(checkpoint, str(place))
    draft = assemble(checkpoint, str(place))
    if facts is not None:
        facts.check(draft)
        draft = _named(draft, target, facts)
    module = FORMATS[to]
    write = {
        "sglang": lambda: module.write(draft, sglang_rule),
        "safeailab": lambda: module.write(draft, facts.num_layers if facts else _known_layers(draft)),
    }.get(to, lambda: module.write(draft))
    config, tensors = write()
    if to in ("sglang", "safeailab") and facts is not None:
        _compare_embedding(draft, facts)
    note(f"read {place} ({layout}): taps {list(draft.taps)} = {draft.taps.words(facts.num_layers if facts else None)}")
    for sentence in notes_on(Folder(draft, raw, frozenset(stored), layout, True), facts):
        note(f"note: {sentence}")
    write_folder(destination, config, tensors)
    found = inspect(destination, draft.taps, None, facts)
    note(f"wrote {destination} ({to})")
    typer.echo(render(found))
    if print_serve:
        name = draft.facts["verifier"].get("name_or_path") or "TARGET"
        typer.echo(module.serve_command(draft, str(destination), name))
    write_json(json_file, found)


def inspect_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Draft folder or hub name, in any known format.")],
    taps: TapsOption = None,
    convention: ConventionOption = None,
    target: TargetFactsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Say what a draft folder holds and what servers would do with it; writes nothing."""
    from convert.inspection import inspect, render
    from eagle3_jax.models.target import resolve

    place = resolve(source, also=("pytorch_model*.bin",))
    found = inspect(place, _taps(taps), convention, _target(target))
    typer.echo(render(found))
    write_json(json_file, found)


def _taps(text: str | None) -> "TapSet | None":
    return None if text is None else tap_set(text)


def _target(path: str | None) -> "TargetFacts | None":
    from convert.target import target_facts

    return None if path is None else target_facts(path)


def _named(draft: "Draft", target: str, facts: "TargetFacts") -> "Draft":
    """The draft with its verifier named, if no file names one. A GGUF is none that a server of the draft can load."""
    name = (draft.facts.get("target") or {}).get("hub_id") if facts.path.suffix == ".gguf" else target
    if draft.facts["verifier"].get("name_or_path") or not name:
        return draft
    verifier = {"name_or_path": name, "architectures": list(facts.architectures)}
    return dataclasses.replace(draft, facts={**draft.facts, "verifier": verifier})


def _known_layers(draft: "Draft") -> int | None:
    facts: dict[str, Any] = draft.facts.get("target") or {}
    return (facts.get("fingerprint") or {}).get("num_layers")


def _compare_embedding(draft: "Draft", target: "TargetFacts") -> None:
    """Refuses a destination that would replace the draft's own embedding by another one, the target's."""
    import numpy as np

    own = draft.params.get("embed_tokens")
    if own is None or draft.config.decoder.hidden_size != target.hidden_size:
        return
    theirs = target.embedding()
    if theirs is None:
        return
    ours = np.asarray(own["weight"])
    if not np.array_equal(ours, theirs.astype(ours.dtype)):
        raise UserError(
            f"the draft's embed_tokens differs from the target's, which would be used instead / {target.path} / "
            "convert to speculators, whose servers keep a draft's own table"
        )

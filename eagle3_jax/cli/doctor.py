"""`eagle3 doctor`: with which wiring was this draft trained, and is it served with that one?"""

from pathlib import Path
from typing import Annotated

import typer

from eagle3_jax.cli.common import (
    DTypeOption,
    JsonOption,
    MeshOption,
    QuantizeOption,
    TargetOption,
    note,
    open_target,
    warn_of_pair,
    write_json,
)
from eagle3_jax.errors import UserError


def doctor_command(
    target: TargetOption,
    draft: Annotated[str, typer.Option(help="Draft folder or hub name.")],
    data: Annotated[Path, typer.Option(help="JSONL file: conversations, or rows of input_ids and loss_mask.")],
    fix: Annotated[Path | None, typer.Option(help="Write the corrected draft to this folder.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Measure on about so many tokens from the data's start.")] = 4096,
    dtype: DTypeOption = "bfloat16",
    quantize: QuantizeOption = None,
    mesh: MeshOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure a draft's accuracy under every plausible wiring and tell which one it was trained with.

    Exit status 0: the declared wiring is the best one. 1: it is not, or the folder contradicts itself.
    """
    from eagle3_jax.data.records import read_records

    read_records(data)  # faults come before the model is loaded
    if fix is not None and Path(draft).exists() and fix.resolve() == Path(draft).resolve():
        raise UserError(f"--fix {fix} is the draft itself / name another folder")
    if fix is not None:
        from eagle3_jax.draft.folder import check_destination

        check_destination(fix)  # nor is all measured before it is found that it cannot be written
    loaded = open_target(target, dtype, quantize, mesh)
    from eagle3_jax.data.template import ChatOptions
    from eagle3_jax.doctor.fix import repairable, write_fix
    from eagle3_jax.doctor.opening import open_draft
    from eagle3_jax.doctor.report import remarks, serving_lines, table, to_json, verdict
    from eagle3_jax.doctor.search import diagnose
    from eagle3_jax.draft.draft import binding_warning
    from eagle3_jax.training.dataset import read_documents

    warn_of_pair(loaded, None)
    opened = open_draft(draft, loaded)
    if (warning := binding_warning(opened.stored, loaded)) is not None:
        note(warning)
    documents = read_documents(str(data), loaded, options=ChatOptions(template=opened.stored.chat_template))
    diagnosis = diagnose(loaded, opened, documents.items, tokens, note)
    layers, best = loaded.num_layers, diagnosis.best.wiring
    print("\n".join(table(diagnosis, layers)), end="\n\n")
    for line in [*opened.faults, *remarks(diagnosis, layers)]:
        print(f"note: {line}")
    print(f"verdict: {verdict(diagnosis, layers)}", end="\n\n")
    print("\n".join(serving_lines(best)))
    write_json(json_file, to_json(diagnosis, layers, opened.faults))
    if fix is not None:
        if repairable(best, opened):
            write_fix(opened, best, fix)
            note(f"corrected draft written to {fix}")
        else:
            note(f"nothing that a config can correct, so {fix} is not written")
    if not diagnosis.healthy or opened.faults:
        raise typer.Exit(1)

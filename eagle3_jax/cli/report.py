"""`eagle3 report`: the page of a run, made anew from its files."""

from pathlib import Path
from typing import Annotated

import typer


def report_command(run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not: runs/NAME.")]) -> None:
    """Write RUN/report.html: loss, tau, acceptance, data, sample answers, provenance, in one file."""
    from eagle3_jax.training.report import write_report

    print(write_report(run))

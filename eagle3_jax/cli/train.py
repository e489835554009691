"""`eagle3 train` (and train.py): a config in, a run folder with a trained draft out."""

import json
from pathlib import Path
from typing import Annotated

import typer

from eagle3_jax.cli.common import JsonOption, note, start_jax, write_json
from eagle3_jax.config import load_config
from eagle3_jax.errors import UserError


def train_command(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[A.B=C ...]", help="Values that replace those of the config.")
    ] = None,
    config: Annotated[Path, typer.Option("--config", help="YAML file; configs/ has commented ones.")] = ...,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run.")] = False,
    init_from: Annotated[
        str | None, typer.Option("--init-from", help="Start from a draft folder: its weights and vocabulary map.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Begin nothing; print parameters, memory, disk, steps and time.")
    ] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="One of several processes: HOST:PORT of the first, or `auto` where a cluster tells (Slurm, TPU)."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many processes, with --coordinator HOST:PORT.")
    ] = None,
    process: Annotated[int | None, typer.Option(min=0, help="Which of them this is, from 0.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Trains an EAGLE-3 draft for a frozen target. Writes runs/NAME; Ctrl-C saves a checkpoint first."""
    settings = load_config(config, overrides or [])
    _join(coordinator, processes, process)
    start_jax(settings.target.dtype)
    if dry:
        from eagle3_jax.training.dry_run import dry_run, lines

        figures = dry_run(settings, None, init_from, note)
        print("\n".join(lines(figures)))
        write_json(json_file, figures)
        return
    from eagle3_jax.training.trainer import train

    with TrainingProgress() as progress:
        result = train(settings, resume, init_from, progress=progress.update, say=note)
    write_json(json_file, result)
    print(json.dumps(result["heldout"]))


def _join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Makes this process one of several, before jax looks at its devices."""
    if coordinator is None:
        if processes is not None or process is not None:
            raise UserError("--processes and --process need --coordinator HOST:PORT, the address of process 0")
        return
    told = coordinator == "auto"  # by the cluster
    if not told and (processes is None or process is None or process >= processes):
        raise UserError("--coordinator needs --processes N and --process I, from 0 to N-1 / or --coordinator auto")
    import jax

    try:
        jax.distributed.initialize(*(() if told else (coordinator, processes, process)))
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot join the other processes / --coordinator {coordinator} / {reason} / `auto` is for Slurm and TPU "
            "pods, elsewhere give HOST:PORT of the first process"
        ) from error


class TrainingProgress:
    """A progress bar with tokens/s, loss, simulated tau and time left; plain lines where stderr is no terminal."""

    def __enter__(self):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._plain = not console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, disable=self._plain)
        self._bar.start()
        self._task = self._bar.add_task("preparing", total=1.0)
        self._next_line = 0.0
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def update(self, report) -> None:
        """Takes one `trainer.Report`."""
        metrics = report.metrics
        line = (
            f"step {report.step}  loss {metrics['loss']:.3f}  simulated tau {metrics['simulated_tau']:.3f}  "
            f"{metrics['tokens_per_second']:.0f} tok/s  {report.seconds_left / 60:.1f} min left"
        )
        if report.heldout is not None:
            note(f"{line}  held-out simulated tau {report.heldout['simulated_tau']:.3f}")
        elif self._plain and report.progress >= self._next_line:
            note(line)
            self._next_line = report.progress + 0.05
        self._bar.update(self._task, completed=min(report.progress, 1.0), description=line)

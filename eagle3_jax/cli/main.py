"""Entry point of `eagle3`: puts the commands together and turns errors into exit codes.

0 = done, 1 = `doctor` found a fault, 2 = bad input (one line on stderr), 130 = interrupted; a bug shows its traceback.
Command modules import jax and transformers inside their functions, so that help and usage errors come at once.
"""

import os
import sys

import typer

from eagle3_jax.cli.bench import bench_command
from eagle3_jax.cli.convert import convert_command, inspect_command
from eagle3_jax.cli.data import data_app
from eagle3_jax.cli.demo import demo_command
from eagle3_jax.cli.doctor import doctor_command
from eagle3_jax.cli.generate import generate_command
from eagle3_jax.cli.report import report_command
from eagle3_jax.cli.serve import serve_command
from eagle3_jax.cli.train import train_command
from eagle3_jax.errors import UserError

app = typer.Typer(name="eagle3", add_completion=False)
app.command("generate")(generate_command)
app.command("serve")(serve_command)
app.command("bench")(bench_command)
app.command("convert")(convert_command)
app.command("inspect")(inspect_command)
app.command("demo")(demo_command)
app.command("train")(train_command)
app.command("report")(report_command)
app.command("doctor")(doctor_command)
app.add_typer(data_app, name="data")


@app.callback()
def _eagle3() -> None:
    """EAGLE-3 speculative decoding in JAX: train a draft for a frozen target and generate faster with the pair."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line (None = that of the process) and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _invoke(arguments or ["--help"])
    except typer.TyperException as error:  # usage: misspelt, missing or malformed options and commands
        _complain(_usage_message(error))
        return error.exit_code
    except (UserError, AssertionError) as error:
        if isinstance(error, AssertionError) and not _is_wiring_error(error):
            raise
        _complain(str(error))
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:160] or "no memory"
        _complain(
            f"out of memory / {reason} / lower the rows, slots or lengths that are computed at once; in training also "
            "set training.accumulate or training.remat, and see --dry-run"
        )
        return 2
    except KeyboardInterrupt as error:
        _complain(str(error) or "interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone. Python would fail once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _invoke(arguments: list[str]) -> int:
    # Not `command(...)`: that handles errors and interrupts itself, over several lines and with other exit codes.
    command = typer.main.get_command(app)
    try:
        with command.make_context("eagle3", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as exit_:
        return exit_.exit_code
    return 0


def _usage_message(error: typer.TyperException) -> str:
    nearest = (getattr(error, "possibilities", None) or [""])[0]  # of a misspelt option; commands bring theirs along
    context = getattr(error, "ctx", None)
    return (
        error.format_message().partition(" (Possible options:")[0]
        + (f", did you mean {nearest}?" if nearest else "")
        + f" / see `{context.command_path if context else 'eagle3'} --help`"
    )


def _is_wiring_error(error: AssertionError) -> bool:
    from eagle3_jax.taps import WiringError  # here, since it brings jax; whoever raised one has it already

    return isinstance(error, WiringError)


def _is_out_of_memory(error: Exception) -> bool:
    """Of this machine, or of a device, of which jax says so in its RuntimeErrors."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _complain(message: str) -> None:
    print(f"eagle3: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

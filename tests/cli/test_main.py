"""Exit codes and the one line that bad input ends in."""

import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_jax.cli import main as main_module
from eagle3_jax.errors import UserError
from eagle3_jax.taps import WiringError

PACKAGE = Path(main_module.__file__).resolve().parents[1]


def test_no_arguments_show_the_commands(eagle3):
    result = eagle3()
    assert result.code == 0 and "generate" in result.out and result.err == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["genrate", "hi"], "generate"),
        (["data", "genrate"], "generate"),
        (["generate", "--target", "demo", "--temprature", "0", "hi"], "--temperature"),
        (["generate", "--target", "demo", "--dtype", "int4", "hi"], "bfloat16"),
        (["generate", "--target", "demo"], "prompt"),
        (["generate", "hi"], "--target"),
        (["data"], "data --help"),
    ],
)
def test_misuse_names_what_was_meant(eagle3, arguments, named):
    assert named in eagle3(*arguments).complaint


@pytest.mark.parametrize("error", [UserError("bad\nthing / here"), WiringError("bad thing / here")])
def test_errors_of_the_user_are_one_line(eagle3, monkeypatch, error):
    def fail(_arguments):
        raise error

    monkeypatch.setattr(main_module, "_invoke", fail)
    assert eagle3("x").complaint == "eagle3: bad thing / here\n"


def test_a_bug_keeps_its_traceback(eagle3, monkeypatch):
    def fail(_arguments):
        raise AssertionError("a bug")

    monkeypatch.setattr(main_module, "_invoke", fail)
    with pytest.raises(AssertionError, match="a bug"):
        eagle3("x")


def test_an_interrupt_exits_with_130_and_one_line(eagle3, monkeypatch):
    def interrupt(_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_invoke", interrupt)
    assert eagle3("x") == (130, "", "eagle3: interrupted\n")


def test_a_reader_that_went_away_is_no_traceback(target):
    script = "import sys; from eagle3_jax.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "generate", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert (process.wait(timeout=60), process.stderr.read()) == (1, "")
    process.stderr.close()


def test_the_commands_import_neither_jax_nor_transformers():
    # The package itself is replaced: what is asked here is whether the modules of the command line are light.
    script = (
        "import sys, types\n"
        "package = types.ModuleType('eagle3_jax'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['eagle3_jax'] = package\n"
        "import eagle3_jax.cli.main\n"
        "print([name for name in ('jax', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, PACKAGE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

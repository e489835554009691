"""A tiny target on disk, and a call of the command line that returns exit code, stdout and stderr."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from eagle3_jax.cli.main import main
from tests.cli.tiny_target import write_tiny_target


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of an error, checked to be one: exit code 2, nothing on stdout."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.startswith("eagle3: ") and self.err.endswith("\n") and self.err.count("\n") == 1, self.err
        return self.err


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def eagle3(capfd) -> Callable[..., Outcome]:
    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capfd.readouterr())

    return run

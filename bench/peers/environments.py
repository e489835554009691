"""An environment for each peer, made on the first run in a folder of its own and kept there."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from tools.check_with_originals import make_environment, speculators_installs

SPECJAX, COMMIT = "https://github.com/tails-mpt/SpecJAX", "d047ed49c71fb13c470f9953674dba5863a005a4"


class Environment(NamedTuple):
    """Where a trainer runs. source, commit: of its checkout, if it has one."""

    interpreter: Path
    source: Path | None = None
    commit: str | None = None


def ours(folder: Path, python: str, torch: str, specjax: str) -> Environment:
    """The environment that this runs in."""
    return Environment(Path(sys.executable))


def speculators(folder: Path, python: str, torch: str, specjax: str) -> Environment:
    return Environment(make_environment(folder / "speculators", python, *speculators_installs(torch)))


def specjax(folder: Path, python: str, torch: str, specjax: str) -> Environment:
    """Its checkout, and an environment of what it imports, with the jax that we run on."""
    pinned = [f"{name}=={metadata.version(name)}" for name in ("jax", "optax", "transformers", "safetensors", "numpy")]
    source = folder / "SpecJAX"
    if not source.exists():
        try:
            subprocess.run(["git", "clone", "--quiet", specjax, source], check=True)
            subprocess.run(["git", "-C", source, "checkout", "--quiet", COMMIT], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"cannot clone SpecJAX / {specjax} / {error}") from error
    return Environment(make_environment(folder / "specjax", sys.executable, pinned), source, COMMIT)


BUILD = {"ours": ours, "speculators": speculators, "specjax": specjax}

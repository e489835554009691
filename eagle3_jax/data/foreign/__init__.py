"""Training data of others: features of a target, stored by speculators, SpecForge or ModelOpt.

One module a format. What a file is follows from its content, never from its name; `open_sample` finds out.
"""

import os
import re
from pathlib import Path

from eagle3_jax.data.foreign import modelopt, specforge, speculators_hs, speculators_v0, speculators_v1
from eagle3_jax.data.foreign.sample import Sample
from eagle3_jax.data.unpickle import load_torch
from eagle3_jax.errors import UserError

SUFFIXES = (".pt", ".ckpt", ".ckpt.gz", ".safetensors")
_FORMATS = (speculators_v1, specforge, modelopt, speculators_v0)
# Not samples, although they lie beside them: token counts and vocabulary maps.
_SIDE_FILES = re.compile(r"token_freq.*\.pt|(d2t|t2d|vocab_mapping).*\.pt")


def is_stored(path: str | Path) -> bool:
    """Whether a path names stored features (a folder, or a file with one of their endings) and not JSONL."""
    return os.path.isdir(path) or str(path).endswith(SUFFIXES)


def sample_files(path: str | Path) -> list[Path]:
    """The files of samples below a folder, in the order of their numbers; a file is itself. UserError if none."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.exists():
        raise UserError(f"no such file or folder / {path} / give stored features or JSONL")
    found = [file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file()]
    found = [file for file in found if not _SIDE_FILES.fullmatch(file.name)]
    if not found:
        raise UserError(f"no stored features in the folder / {path} / expected files {', '.join(SUFFIXES)}")
    return sorted(
        found,
        key=lambda file: [
            (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", str(file))
        ],
    )


def open_sample(path: Path) -> Sample:
    """Opens one file: ids, mask and what it says; its states are read on demand.

    Raises UserError for torn files, files of another kind, and content that does not fit together.
    """
    if path.name.endswith(".safetensors"):
        return speculators_hs.read(path)
    content = load_torch(path, lazy=True)
    if not isinstance(content, dict):
        raise UserError(f"no sample but a {type(content).__name__} / {path} / expected a dict of tensors")
    fitting = [module for module in _FORMATS if module.matches(content)]
    if len(fitting) != 1:
        keys = ", ".join(map(str, list(content)[:8]))
        problem = "fits several formats" if fitting else "is of no known format"
        raise UserError(
            f"the file {problem} (keys {keys}) / {path} / known: {'; '.join(module.NAME for module in _FORMATS)}"
        )
    return fitting[0].read(path, content)

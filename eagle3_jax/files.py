"""Files that appear whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name in the same folder to write the file under: it becomes `path` once the block has ended and all of it is on
    the disk, and is removed if the block fails. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_disk(path: Path) -> None:
    """Returns when all of a file is on the disk. Raises OSError."""
    with open(path, "r+b") as written:
        os.fsync(written.fileno())


def write_whole(path: Path, text: str) -> None:
    """Writes a text file in UTF-8. Raises OSError."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

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
        with open(temporary, "r+b") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Writes a text file in UTF-8. Raises OSError."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

"""Files that appear whole or not at all, JSON that says each thing once, and what one process holds alone."""

import errno
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_jax.errors import UserError


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


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps other processes from holding this file or folder until the block ends or this process dies.

    Raises UserError if another one holds it, OSError if it is not there. Some network file systems have no such locks:
    there it does nothing.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is writing there / {path} / wait for it, or choose another name"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(opened)


_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises ValueError for what is none, and for an object that says two things under one key,
    of which JSON takes the last one without a word."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs) and (twice := [key for key, value in pairs if made[key] != value]):
        raise ValueError(f"the key {twice[0]!r} twice in one object")
    return made

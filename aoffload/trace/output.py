"""A file that is there whole, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path, beside: Path) -> Iterator[TextIO]:
    """Written under another name first. Raises `OSError` at once where nothing can be written, and for `beside` itself:
    nobody means to write over the log. A device or a pipe is written to, never replaced."""
    if path.exists() and beside.exists() and path.samefile(beside):
        raise OSError(errno.EEXIST, "is the log itself", str(path))
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, "no such directory", str(path.parent))
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as device:
            yield device
        return
    with _replaced(path.resolve()) as file:  # not the link to it
        yield file


@contextmanager
def _replaced(path: Path) -> Iterator[TextIO]:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    file = part.open("x", encoding="utf-8")  # what is there already is somebody else's
    try:
        with file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

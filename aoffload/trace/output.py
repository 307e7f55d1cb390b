"""Writes a file whole, or not at all."""

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
    """Write `path` under a temporary name, and rename it at the end. Raises `OSError` at once if nothing can be written
    there, or if it is `beside`, the log itself. A device or a pipe is written to, never replaced."""
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
    with _replaced(path.resolve()) as file:  # the file that a link points to, not the link
        yield file


@contextmanager
def _replaced(path: Path) -> Iterator[TextIO]:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    file = part.open("x", encoding="utf-8")  # an existing one belongs to another process
    try:
        with file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)

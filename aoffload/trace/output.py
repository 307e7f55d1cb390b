"""Output of the commands: text tables, pages, files written whole or not at all, and the progress of reading a log."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TextIO

import attrs

from .._common.commands import ProgressLine, bar

# -- table -----------------------------------------------------------------------------------------------------------
#
# A table in plain text: the first columns flush left, the others flush right.


def text_table(rows: Sequence[Sequence[str]], first_left: int = 1) -> list[str]:
    """The lines of a table. The first `first_left` columns are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths, first_left)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int], first_left: int) -> list[str]:
    return [
        cell.ljust(width) if at < first_left else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def asset(package: str, name: str) -> str:
    """The text of a file in the `assets` of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """Hash of `text` for a page's policy, which allows this text and nothing that a log or a trace contains."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def filled_in(template: str, parts: Mapping[str, str]) -> str:
    """`template` with each `%MARK%` replaced, in one pass: inserted text is not searched for marks."""
    return re.sub("%([A-Z]+)%", lambda mark: parts[mark[1]], template)


# -- output ----------------------------------------------------------------------------------------------------------


@contextmanager
def whole_file(path: Path, beside: Path | None = None) -> Iterator[TextIO]:
    """Write `path` under a temporary name, and rename it at the end. Raises `OSError` at once if nothing can be written
    there, or if it is `beside`, the input file. A device or a pipe is written to, never replaced."""
    if beside is not None and path.exists() and beside.exists() and path.samefile(beside):
        raise OSError(errno.EEXIST, "is the input file", str(path))
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


# -- progress --------------------------------------------------------------------------------------------------------
#
# Progress of reading the log: one line on a terminal, rewritten in place, and nothing elsewhere.

BAR_WIDTH = 30


@attrs.define(eq=False)
class Progress:
    line: ProgressLine
    total_bytes: int = 0
    """Zero if the length of the log is unknown (standard input)."""

    def update(self, num_bytes: int, num_lines: int) -> None:
        """Show the position in the log. Cheap enough for every thousandth line."""
        self.line.show(lambda: f"reading {self._read(num_bytes)}{num_lines:,} lines")

    def _read(self, num_bytes: int) -> str:
        if not self.total_bytes:
            return ""
        part = min(1.0, num_bytes / self.total_bytes)
        return f"{bar(part, BAR_WIDTH)} {part:4.0%}  "

"""The lines of a log, one after the other, in bounded memory however long the log or a line is."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import attrs

from .progress import Progress

__all__ = ["MAX_LINE_BYTES", "LogLines"]

MAX_LINE_BYTES = 1 << 20
"""No event is that long. A longer line is cut, so it is not JSON and counts as such."""
LINES_PER_UPDATE = 2048
GZIP = b"\x1f\x8b"
"""How a compressed log begins, whatever its name is."""


@attrs.define(eq=False)
class LogLines:
    """Iterates over the lines of `path`, which may be compressed with gzip, or of standard input for `-`."""

    path: Path
    progress: Progress
    num_lines: int = 0
    """Lines read so far, which is the number of the current line."""
    num_bytes: int = 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            if str(self.path) == "-":
                yield from self._lines(sys.stdin.buffer)
                return
            with self.path.open("rb") as file:
                if file.peek(len(GZIP)).startswith(GZIP):
                    yield from self._unpacked(file)
                    return
                self.progress.total_bytes = self.path.stat().st_size
                yield from self._lines(file)
        finally:
            self.progress.clear()

    def _unpacked(self, file: BinaryIO) -> Iterator[bytes]:
        """Where the compressed data breaks off, a last line without an end says so."""
        try:
            with gzip.open(file) as unpacked:
                yield from self._lines(cast(BinaryIO, unpacked))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.num_lines += 1
            yield f"the compressed log is cut off: {error}".encode()

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        while line := file.readline(MAX_LINE_BYTES):
            self.num_lines += 1
            self.num_bytes += len(line)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = self._without_rest(line, file)
            if self.num_lines % LINES_PER_UPDATE == 0:
                self.progress.update(self.num_bytes, self.num_lines)
            yield line

    def _without_rest(self, line: bytes, file: BinaryIO) -> bytes:
        """Skip the rest of a line that is too long. It gets its newline only if it had one: a log may be cut off."""
        while rest := file.readline(MAX_LINE_BYTES):
            self.num_bytes += len(rest)
            if rest.endswith(b"\n"):
                return line[:-1] + b"\n"
        return line

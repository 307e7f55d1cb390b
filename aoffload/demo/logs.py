"""The logger of events, which writes JSON lines to a file, or nothing."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import attrs
import structlog

from ..errors import InvalidArgument


@attrs.define(eq=False)
class LogFile:
    """A log whose errors do not stop the program. If it can't be written, because the disk is full, for example, it
    reports that once."""

    path: Path
    trouble: TextIO = attrs.field(factory=lambda: sys.stderr)
    """The stream for that report."""
    num_lost: int = attrs.field(default=0, init=False)
    """Events that are missing in the file, or incomplete."""
    _file: Any = attrs.field(default=None, init=False)
    _is_torn: bool = attrs.field(default=False, init=False)
    """Whether the last event was written only in part."""

    def __enter__(self) -> Self:
        """Raises `InvalidArgument` naming `log` if the file cannot be opened."""
        try:
            self._file = self.path.open("wb", buffering=0)
        except (OSError, ValueError) as error:  # ValueError: a name with a null character
            raise InvalidArgument("log", f"cannot be written: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._file.close()
        except OSError as problem:
            self._say(f"{self.path}: {problem}")
        if self.num_lost:
            self._say(f"{self.path}: {self.num_lost} events were lost in all")

    def write(self, line: str) -> None:
        """Append an event. If the last one was written in part, end its line first."""
        data = (b"\n" if self._is_torn else b"") + line.encode(errors="backslashreplace")
        try:
            num_written = self._file.write(data)
        except OSError as error:
            self._tell(error)
            return
        self._is_torn = num_written < len(data)
        if self._is_torn:
            self._tell("the event did not fit completely")

    def flush(self) -> None:
        """Does nothing, because nothing is buffered."""

    def _tell(self, error: OSError | str) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            self._say(f"{self.path}: events are lost from here on: {error}")

    def _say(self, text: str) -> None:
        try:
            print(text, file=self.trouble, flush=True)
        except OSError:
            return  # there is no stream for the report


def make_logger(file: LogFile | TextIO | None) -> Any:
    """A structlog logger that neither reads nor changes structlog's global configuration."""
    if file is None:
        return structlog.wrap_logger(
            structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
        )
    return structlog.wrap_logger(
        structlog.WriteLogger(file),  # type: ignore[arg-type]  # it uses no more than `write` and `flush`
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    )

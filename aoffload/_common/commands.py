"""Helpers of the commands: exit status, one line on standard error, numbers and options, and a line of progress."""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TextIO

import attrs

from ..errors import AoffloadError, ConfigError, InvalidArgument
from .text import plain

BAD_INPUT = 2
INTERRUPTED = 130


def print_any_name() -> None:
    """Let standard output accept the name of any file, including names with lone surrogates. Raises `OSError` if
    standard output is closed."""
    if sys.stdout is None:  # the shell closed it: `>&-`
        raise OSError(errno.EBADF, "standard output is closed")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines that may contain text from outside, with escape sequences made visible."""
    for line in lines:
        print(plain(line))


def print_aside(line: str) -> None:
    """Print a line on standard error, with escape sequences made visible. Does nothing if that isn't possible."""
    if sys.stderr is not None:  # for None, `print` would write to standard output
        with suppress(OSError):  # for example a terminal that was closed
            print(plain(line), file=sys.stderr)


def complain(command: str, problem: str) -> int:
    """Print one line on standard error, with escape sequences made visible. Returns the exit status."""
    print_aside(f"aoffload {command}: {problem}")
    return BAD_INPUT


def ended_by(command: str, error: OSError) -> int:
    """Report `error` with the file that it names. Returns the exit status, which is 0 if the reader of a pipe has
    closed it (`| head`)."""
    abandon_output()
    if isinstance(error, BrokenPipeError):
        return 0
    problem = error.strerror or str(error)
    return complain(command, f"{error.filename}: {problem}" if error.filename else problem)


def abandon_output() -> None:
    """If standard output accepts no more text, discard the rest of it, because Python would try to write it once more
    at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_goes_with(parser: argparse.ArgumentParser, found: argparse.Namespace, pairs: Mapping[str, str]) -> None:
    """Exit with an error of `parser` if an option was given without the option that it needs, because it would have no
    effect. `pairs` maps each such option to the option that it needs."""
    for option, other in pairs.items():
        is_given = getattr(found, option) != parser.get_default(option)
        if is_given and getattr(found, other) == parser.get_default(other):
            parser.error(f"argument {_flag(option)}: has an effect only with {_flag(other)}")


def by_option(error: AoffloadError, options: Mapping[str, str]) -> str:
    """The message of `error`, with the name of the option in place of the argument's. `options`: by argument, the
    options that have another name."""
    if isinstance(error, (InvalidArgument, ConfigError)):
        return f"argument {_flag(options.get(error.argument, error.argument))}: {error.problem}"
    return str(error)


def count(minimum: int, maximum: int) -> Callable[[str], int]:
    """For `type=`: an integer in that range, or a message that names the range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be an integer in [{minimum}, {maximum}], got {text!r:.80}")
        return value

    return parse


def number(what: str, is_right: Callable[[float], bool]) -> Callable[[str], float]:
    """For `type=`: a number for which `is_right` returns True, or a message that it must be `what`. `is_right` has to
    refuse nan."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_right(value):
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r:.80}")
        return value

    return parse


INTERVAL_S = 0.1
"""Minimum seconds between two versions of a progress line."""


@attrs.define(eq=False)
class ProgressLine:
    """A line on a terminal that is rewritten in place. Cheap enough to call at every step."""

    stream: TextIO | None
    """None if standard error is closed: nothing is shown."""
    _last_s: float = -1.0
    _on_screen: bool = False

    @property
    def is_terminal(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def show(self, text: Callable[[], str]) -> None:
        """Rewrite the progress line, unless the last rewrite was less than `INTERVAL_S` ago."""
        now = time.monotonic()
        if self.is_terminal and now - self._last_s >= INTERVAL_S:
            self._last_s, self._on_screen = now, True
            self.print(f"\r{text()}\x1b[K")

    def clear(self) -> None:
        """Leave an empty line for other output."""
        if self._on_screen:
            self._on_screen = False
            self.print("\r\x1b[K")

    def print(self, text: str) -> None:
        if self.stream is not None:
            self.stream.write(text)
            self.stream.flush()


def bar(part: float, width: int) -> str:
    """A bar of `width` characters, of which `part`, in [0, 1], is filled."""
    filled = int(width * part)
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""How a command that reads a file ends: its exit status, and at most one line on standard error."""

from __future__ import annotations

import os
import sys

__all__ = ["BAD_INPUT", "INTERRUPTED", "complain", "ended_by", "print_any_name"]

BAD_INPUT = 2
INTERRUPTED = 130


def print_any_name() -> None:
    """Let standard output take the name of any file, also one with half a surrogate pair."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def complain(command: str, problem: str) -> int:
    print(f"aoffload {command}: {problem}", file=sys.stderr)
    return BAD_INPUT


def ended_by(command: str, error: OSError) -> int:
    """The status after `error`, with the file that it names. 0 where whoever reads has seen enough (`| head`)."""
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    problem = error.strerror or str(error)
    return complain(command, f"{error.filename}: {problem}" if error.filename else problem)

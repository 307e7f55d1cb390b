"""Helpers of the commands: exit status, one line on standard error, and options that need another option."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

__all__ = ["BAD_INPUT", "INTERRUPTED", "check_goes_with", "complain", "ended_by", "print_any_name"]


BAD_INPUT = 2
INTERRUPTED = 130


def print_any_name() -> None:
    """Let standard output accept the name of any file, also one with half a surrogate pair."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def complain(command: str, problem: str) -> int:
    print(f"aoffload {command}: {problem}", file=sys.stderr)
    return BAD_INPUT


def ended_by(command: str, error: OSError) -> int:
    """Report `error` with the file that it names. Returns the exit status: 0 if the reader of a pipe has closed it
    (`| head`)."""
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    problem = error.strerror or str(error)
    return complain(command, f"{error.filename}: {problem}" if error.filename else problem)


def check_goes_with(parser: argparse.ArgumentParser, found: argparse.Namespace, pairs: Mapping[str, str]) -> None:
    """Refuse, as argparse does, each option among the keys of `pairs` that was given without the option that is its
    value, because it would have no effect."""
    for option, other in pairs.items():
        is_given = getattr(found, option) != parser.get_default(option)
        if is_given and getattr(found, other) == parser.get_default(other):
            parser.error(f"argument {_flag(option)}: has an effect only with {_flag(other)}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

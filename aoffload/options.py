"""Options of a command that have an effect only with another option."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

__all__ = ["check_goes_with"]


def check_goes_with(parser: argparse.ArgumentParser, found: argparse.Namespace, pairs: Mapping[str, str]) -> None:
    """Refuse, as argparse does, each option among the keys of `pairs` that was given without the option that is its
    value, because it would have no effect."""
    for option, other in pairs.items():
        is_given = getattr(found, option) != parser.get_default(option)
        if is_given and getattr(found, other) == parser.get_default(other):
            parser.error(f"argument {_flag(option)}: has an effect only with {_flag(other)}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

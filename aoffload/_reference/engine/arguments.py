"""Numbers on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["count"]


def count(minimum: int, maximum: int) -> Callable[[str], int]:
    """For `type=`: an integer in that range, or a message that names the range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be an integer in [{minimum}, {maximum}], got {text!r}")
        return value

    return parse

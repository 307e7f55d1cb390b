"""Sizes of a dry run: with `AOFFLOAD_SMALL` set, everything is as small as possible, and figures mean nothing."""

from __future__ import annotations

import os
from typing import TypeVar

__all__ = ["IS_SMALL", "sized"]

IS_SMALL = bool(os.environ.get("AOFFLOAD_SMALL"))
T = TypeVar("T")


def sized(full: T, small: T) -> T:
    """`full`, or `small` in a dry run."""
    return small if IS_SMALL else full

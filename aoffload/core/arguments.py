"""Checks of what callers hand in: a typed error that names the argument, before anything is changed."""

from __future__ import annotations

import math

from ..errors import InvalidArgument

__all__ = ["check_int"]


def check_int(name: str, value: object, minimum: int, maximum: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InvalidArgument(name, f"must be an integer in [{minimum}, {maximum}], got {value!r}")
    return value

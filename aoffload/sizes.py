"""Sizes as people write them."""

from __future__ import annotations

import re

from .arguments import shown
from .errors import ConfigError

__all__ = ["parse_bytes"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(argument: str, value: int | str) -> int:
    """`8589934592`, `"8GiB"`, `"512 MB"` → bytes."""
    if type(value) is int:
        size: float = value
    elif isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ConfigError(argument, f"is not a size: {shown(value)} (examples: 8589934592, '8GiB', '512MB')")
        size = float(found[1]) * _UNITS[found[2].upper()]
    else:
        raise ConfigError(argument, f"must be an int or a string such as '8GiB', got {shown(value)}")
    if not 1 <= size < 2**60:
        raise ConfigError(argument, f"must be at least 1 byte and below 1 EiB, got {shown(value)}")
    return int(size)

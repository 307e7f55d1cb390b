"""The disk tier as a configuration names it: where it is, how much of the disk it takes, and how much it may write."""

from __future__ import annotations

import os
from typing import Any

import attrs

from .arguments import number_of, shown
from .errors import ConfigError
from .sizes import parse_bytes

__all__ = ["ROUNDING_BYTES", "SUPERBLOCK_BYTES", "DiskTier", "num_slots_in", "record_bytes"]

SUPERBLOCK_BYTES = 4096
ROUNDING_BYTES = 4 * 4096
"""What a file system rounds up: two files and their directory."""
RECORD_BYTES = 144
"""Of a record of the slot table, without the tokens of its unit."""
TOKEN_BYTES = 4
MAX_SLOTS = 2**31 - 1
MAX_FLUSH_S = 1e9


def record_bytes(unit_tokens: int) -> int:
    """Bytes of one record of the slot table, for units of `unit_tokens` tokens."""
    return -(-(RECORD_BYTES + unit_tokens * TOKEN_BYTES) // 8) * 8


def num_slots_in(size_bytes: int, block_bytes: int, unit_tokens: int) -> int:
    """Blocks of `block_bytes` for which `size_bytes` on a disk have room, records included. `ConfigError("size")` if
    there is room for none."""
    found = (size_bytes - SUPERBLOCK_BYTES - ROUNDING_BYTES) // (block_bytes + record_bytes(unit_tokens))
    if found < 1:
        raise ConfigError("size", f"{size_bytes} bytes have no room for a block of {block_bytes}")
    return min(found, MAX_SLOTS)


def _path(value: Any) -> str:
    try:
        found = os.fspath(value)
        os.fsencode(found)
    except (TypeError, UnicodeEncodeError):  # a lone surrogate, which names no file
        found = None
    if not isinstance(found, str) or not found or "\0" in found:
        raise ConfigError("path", f"must be the path of a directory, got {shown(value)}")
    return found


def _size(_: object, attribute: Any, value: Any) -> None:
    parse_bytes(attribute.name, value)


def _seconds(_: object, attribute: Any, value: object) -> None:
    seconds = number_of(value)
    if seconds is None or not 0 <= seconds <= MAX_FLUSH_S:
        raise ConfigError(attribute.name, f"must be a number of seconds up to 1e9, got {shown(value)}")


@attrs.frozen
class DiskTier:
    """A disk tier below host memory, in the directory `path`, which belongs to one process at a time.

    `size` (bytes, or text such as "200GiB") is all that it ever takes on the disk, and is allocated at the start.
    `daily_writes` bounds what it writes within any 24 hours; None: `size`. On closing, at most `close_flush_s` seconds
    are spent on writing what host memory has and the disk lacks; 0: nothing is written then. A start fails if the files
    are not open within `open_timeout_s`. See docs/disk.md.
    """

    path: str = attrs.field(converter=_path)
    size: int | str = attrs.field(validator=_size)
    daily_writes: int | str | None = attrs.field(default=None, validator=attrs.validators.optional(_size))
    close_flush_s: float = attrs.field(default=5.0, validator=_seconds)
    open_timeout_s: float = attrs.field(default=60.0, validator=_seconds)

    @property
    def size_bytes(self) -> int:
        return parse_bytes("size", self.size)

    @property
    def daily_bytes(self) -> int:
        """Bytes that may be written within 24 hours."""
        return self.size_bytes if self.daily_writes is None else parse_bytes("daily_writes", self.daily_writes)

    def num_slots(self, block_bytes: int, unit_tokens: int) -> int:
        """Blocks of `block_bytes`, in units of `unit_tokens` tokens, that it holds. `ConfigError("size")` for none."""
        return num_slots_in(self.size_bytes, block_bytes, unit_tokens)

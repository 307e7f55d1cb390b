"""What a restart has found on the disk."""

from __future__ import annotations

from array import array

import attrs

__all__ = ["RestoredRun"]


@attrs.frozen
class RestoredRun:
    """Units `[start, stop)` of one prefix that an earlier process has left on the disk, proven from their tokens."""

    root: bytes
    before: bytes
    """The digest of the prefix before unit `start`; empty if there is nothing before it."""
    digest: bytes
    """The digest of the prefix up to `stop`."""
    start: int
    stop: int
    tokens: bytes
    slots: tuple[array[int], ...]
    """For each band the blocks of these units on the disk, in order, or none."""

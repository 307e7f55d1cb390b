"""Tombstones: unfindable blocks that references still protect."""

from __future__ import annotations

from array import array

import attrs

__all__ = ["Tombstone"]


@attrs.frozen
class Tombstone:
    """Unfindable blocks that a part held from unit `start` on."""

    start: int
    ids: array[int]

    def units(self, width: int) -> list[Tombstone]:
        """One tombstone per unit."""
        count = len(self.ids) // width
        return [Tombstone(self.start + at, self.ids[at * width : (at + 1) * width]) for at in range(count)]

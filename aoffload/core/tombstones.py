"""Blocks that nobody finds any more, as long as references still protect them."""

from __future__ import annotations

from array import array

import attrs

__all__ = ["Tombstone"]


@attrs.frozen
class Tombstone:
    """Blocks that a part has held from unit `start` on, and that nobody finds there any more."""

    start: int
    ids: array[int]

    def units(self, width: int) -> list[Tombstone]:
        """The same, unit by unit."""
        count = len(self.ids) // width
        return [Tombstone(self.start + at, self.ids[at * width : (at + 1) * width]) for at in range(count)]

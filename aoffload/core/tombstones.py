"""Tombstones: unfindable blocks that references still protect."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

__all__ = ["Tombstone", "divided"]


@dataclass(slots=True, frozen=True)
class Tombstone:
    """Unfindable blocks that a part held from unit `start` on."""

    start: int
    ids: array[int]

    def units(self, width: int) -> list[Tombstone]:
        """One tombstone per unit."""
        count = len(self.ids) // width
        return [Tombstone(self.start + at, self.ids[at * width : (at + 1) * width]) for at in range(count)]


def divided(
    tombstones: tuple[Tombstone, ...], width: int, at: int
) -> tuple[tuple[Tombstone, ...], tuple[Tombstone, ...]]:
    """The tombstones before unit `at`, and those from it on."""
    units = [unit for one in tombstones for unit in one.units(width)]
    return tuple([unit for unit in units if unit.start < at]), tuple([unit for unit in units if unit.start >= at])

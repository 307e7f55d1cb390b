"""Lanes: places items that overlap in time in as few rows as possible."""

from __future__ import annotations

import heapq

import attrs

__all__ = ["Lanes"]


@attrs.define(eq=False)
class Lanes:
    """An item takes the lowest free row when it begins."""

    num_lanes: int = 0
    _free: list[int] = attrs.field(factory=list)

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.num_lanes += 1
        return self.num_lanes - 1

    def give(self, lane: int) -> None:
        heapq.heappush(self._free, lane)

"""Pools: which block ids of a tier are free."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = ["ExtentPool", "FreeList", "are_neighbours"]


FEW = 100
"""Below this many ids, comparing them is faster than looking for gaps by numpy."""


class FreeList:
    """Device blocks `[1, num_rows)`, last in, first out: a block that was just used is the warmest. Row 0 is null.

    Ids given back together are taken again in the same order, so that neighbours stay neighbours."""

    def __init__(self, num_rows: int) -> None:
        self.num_blocks = self.num_free = num_rows - 1
        self._free = array("i", range(1, num_rows))

    def __repr__(self) -> str:
        return f"<FreeList {self.num_free}/{self.num_blocks} free>"

    def take(self, num_blocks: int) -> array[int]:
        keep = self.num_free - num_blocks
        assert keep >= 0, "taken more than is free"
        taken = self._free[keep:]
        del self._free[keep:]
        self.num_free = keep
        return taken

    def give(self, block_ids: array[int]) -> None:
        self._free.extend(block_ids)
        self.num_free += len(block_ids)

    def free_ids(self) -> Iterable[int]:
        return iter(self._free)


class ExtentPool:
    """Host blocks `[0, num_blocks)`, handed out in few contiguous extents: one copy call moves one extent.

    Adjacent free extents are merged. Extents are found by size class (the bit length of their size).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = 0
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._classes: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]
        self._starts: list[int] = []
        """The starts of the free extents, sorted, as `_extent_with` saw them last."""
        if num_blocks:
            self._add(0, num_blocks)

    def __repr__(self) -> str:
        return f"<ExtentPool {self.num_free}/{self.num_blocks} free in {len(self._stop_of)} extents>"

    def take(self, num_blocks: int) -> array[int]:
        assert 0 <= num_blocks <= self.num_free, "taken more than is free"
        taken = array("i")
        while len(taken) < num_blocks:
            wanted = num_blocks - len(taken)
            start = self._find(wanted)
            stop = self._remove(start)
            if stop - start > wanted:
                self._add(start + wanted, stop)
                stop = start + wanted
            taken.extend(id_range(start, stop))
        return taken

    def give(self, block_ids: array[int]) -> None:
        for start, stop in extents(block_ids):
            before = self._start_of.get(start)
            if before is not None:
                self._remove(before)
                start = before
            if stop in self._stop_of:
                stop = self._remove(stop)
            self._add(start, stop)

    def free_ids(self) -> Iterable[int]:
        for start, stop in self._stop_of.items():
            yield from range(start, stop)

    def are_free(self, block_ids: Sequence[int]) -> bool:
        return all(
            self._stop_of.get(self._extent_with(start), 0) >= stop for start, stop in extents(array("i", block_ids))
        )

    def take_ids(self, block_ids: array[int]) -> None:
        """Take exactly these ids. The caller has checked that they are free."""
        for first, last in extents(block_ids):
            start = self._extent_with(first)
            stop = self._remove(start)
            if start < first:
                self._add(start, first)
            else:
                del self._starts[bisect_left(self._starts, start)]
            if last < stop:
                self._add(last, stop)
                insort(self._starts, last)

    def _extent_with(self, block_id: int) -> int:
        """The start of the free extent that holds `block_id`; -1 if it is not free."""
        for starts in (self._starts, None):
            if starts is None:  # extents have changed since, or it is not free
                self._starts = starts = sorted(self._stop_of)
            at = bisect_right(starts, block_id) - 1
            if at >= 0 and self._stop_of.get(starts[at], 0) > block_id:
                return starts[at]
        return -1

    def _find(self, wanted: int) -> int:
        """The start of an extent that holds `wanted` blocks, or of one of the largest."""
        exact = self._classes[wanted.bit_length()]
        for start, _ in zip(exact, range(4), strict=False):  # its class may hold smaller ones: a few tries
            if self._stop_of[start] - start >= wanted:
                return start
        for larger in self._classes[wanted.bit_length() + 1 :]:
            if larger:
                return next(iter(larger))
        for start in exact:  # no larger class has one: search its class before handing out several extents
            if self._stop_of[start] - start >= wanted:
                return start
        return next(next(iter(found)) for found in reversed(self._classes) if found)

    def _add(self, start: int, stop: int) -> None:
        self._stop_of[start] = stop
        self._start_of[stop] = start
        self._classes[(stop - start).bit_length()][start] = None
        self.num_free += stop - start

    def _remove(self, start: int) -> int:
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        del self._classes[(stop - start).bit_length()][start]
        self.num_free -= stop - start
        return stop


def id_range(start: int, stop: int) -> array[int]:
    """The ids `[start, stop)`."""
    if stop - start < FEW:
        return array("i", range(start, stop))
    return array("i", np.arange(start, stop, dtype=np.int32).tobytes())


def are_neighbours(block_ids: array[int]) -> bool:
    """Whether the ids are consecutive and ascending."""
    start, stop = block_ids[0], block_ids[-1] + 1
    return stop - start == len(block_ids) and block_ids == id_range(start, stop)


def extents(block_ids: array[int]) -> Sequence[tuple[int, int]]:
    """`block_ids` as half-open ranges of consecutive ids, in their order."""
    if not block_ids:
        return ()
    if len(block_ids) < FEW and are_neighbours(block_ids):
        return ((block_ids[0], block_ids[-1] + 1),)
    seen = np.frombuffer(block_ids, np.int32)
    found: list[tuple[int, int]] = []
    first = 0
    for last in (*np.flatnonzero(seen[1:] - seen[:-1] != 1).tolist(), len(block_ids) - 1):
        found.append((block_ids[first], block_ids[last] + 1))
        first = last + 1
    return found


class SlotPool(ExtentPool):
    """Slots of a disk. A restart may find what was in a slot that was given back, until another block is stored there.

    `used` are the free slots that this process has had in use.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.used: set[int] = set()

    def take(self, num_blocks: int) -> array[int]:
        taken = super().take(num_blocks)
        self.used.difference_update(taken)
        return taken

    def give(self, block_ids: array[int]) -> None:
        super().give(block_ids)
        self.used.update(block_ids)

    def take_ids(self, block_ids: array[int]) -> None:
        super().take_ids(block_ids)
        self.used.difference_update(block_ids)

"""The block table of one request in one band.

By units; those before `start` have left the window and are null:

    0        start          published              load.stop                  num_units
    |--------|--------------|-----------------------|--------------------------|
    | null:  | leased: the  | in flight: the jobs   | private: only the        |
    | needed | cached path  | own these blocks (0   | request reads these and  |
    | no more| (duplicates  | in the table until    | computes into them       |
    |        | are private) | the load settles)     |                          |

Without a load in flight the private part begins at `published`.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from .intervals import within

__all__ = ["NO_LIMIT", "BlockTable", "not_null", "nulls"]


NO_LIMIT: Final = 2**40
"""A number of units: no limit. Nothing multiplies it: compiled code multiplies what is 2**30 or more as Python objects,
where a signal's handler may run, and takes what that raises for a lack of memory, which ends the process."""
MANY: Final = 100
"""From this many ids on, numpy is faster than a loop that makes each id a Python int."""


_NULL: Final = array("i", [0])


class BlockTable:
    __slots__ = ("duplicates", "ids", "start", "width")

    def __init__(self, width: int, ids: array[int], start: int = 0) -> None:
        self.width = width
        """Block ids per unit."""
        self.ids = ids
        self.start = start
        """Units before this one are null. It never decreases."""
        self.duplicates: list[range] = []
        """Published units whose blocks here are private or null: another request has cached its copy first."""

    def at(self, start: int, stop: int) -> array[int]:
        return self.ids[start * self.width : stop * self.width]

    def put(self, start: int, ids: array[int]) -> None:
        """Write `ids` from unit `start` on."""
        self.ids[start * self.width : start * self.width + len(ids)] = ids

    def exchange(self, start: int, ids: array[int]) -> array[int]:
        """Write `ids` from unit `start` on. Returns the ids they replace, without nulls."""
        at = start * self.width
        taken = self.ids[at : at + len(ids)]
        self.ids[at : at + len(ids)] = ids
        return not_null(taken)

    def begin_at(self, start: int) -> None:
        """Units before `start` are needed no more."""
        self.start = start

    def extend(self, ids: array[int]) -> None:
        """Append `ids`."""
        self.ids.extend(ids)

    def has_duplicates(self, units: range) -> None:
        """Record `units` in `duplicates`: their blocks stay private."""
        self.duplicates.append(units)

    def step_back(self, stop: int) -> None:
        """Forget duplicates from unit `stop` on, where every block is private."""
        self.duplicates = within(self.duplicates, 0, stop)

    def null(self, start: int, stop: int) -> array[int]:
        """Make units `[start, stop)` null. Returns the ids that were there, without nulls."""
        return not_null(self.take(start, stop)) if start < stop else array("i")

    def take(self, start: int, stop: int) -> array[int]:
        """Make units `[start, stop)` null, of which none is. Returns the ids that were there."""
        at, end = start * self.width, stop * self.width
        taken = self.ids[at:end]
        self.ids[at:end] = _NULL * len(taken)
        return taken

    @property
    def num_held(self) -> int:
        return len(self.ids) - self.ids.count(0)

    def num_null(self, start: int, stop: int) -> int:
        return self.ids[start * self.width : stop * self.width].count(0)

    def fill(self, start: int, stop: int, ids: array[int]) -> None:
        """Write `ids` into the null positions of units `[start, stop)`."""
        fresh = iter(ids)
        self.put(start, array("i", [block_id or next(fresh) for block_id in self.at(start, stop)]))

    def private(self, published: int, start: int = 0, stop: int = NO_LIMIT) -> array[int]:
        """The ids in units `[start, stop)` that only the request reads and frees."""
        stop = min(stop, len(self.ids))
        found = not_null(self.ids[max(start, published) * self.width : stop * self.width])
        for units in within(self.duplicates, start, stop) if self.duplicates else ():
            found.extend(not_null(self.at(units.start, units.stop)))
        return found


def nulls(count: int) -> array[int]:
    """`count` times the null block."""
    return _NULL * count


def not_null(ids: array[int]) -> array[int]:
    """`ids` without the null block."""
    if len(ids) < MANY:
        return array("i", filter(None, ids)) if 0 in ids else ids
    seen = np.frombuffer(ids, np.int32)
    number = np.count_nonzero(seen)
    if number == len(ids):
        return ids
    return array("i", seen[seen != 0].tobytes()) if number else array("i")

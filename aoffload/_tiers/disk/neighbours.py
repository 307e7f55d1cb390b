"""Which blocks of a job move in one call: those in neighbouring slots.

slots        7  8  9 10 | 3  4          two calls
host blocks  1  2  5  6 | 0  1          the first has two buffers, [1, 3) and [5, 7)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

__all__ = ["Stretch", "neighbours", "stretch_at"]


MAX_BUFFERS = 1024
"""Of one call: IOV_MAX of Linux."""


@attrs.frozen
class Stretch:
    """Blocks `[first, first + num_blocks)` of a job. Their slots begin at `slot` and follow each other."""

    first: int
    num_blocks: int
    slot: int
    host: tuple[slice, ...]
    """Where they are in host memory, in the order of their slots."""

    @property
    def stop(self) -> int:
        return self.first + self.num_blocks


def stretch_at(slots: Sequence[int], host_ids: Sequence[int], first: int, most: int) -> Stretch:
    """The blocks that move in one call with block `first`, at most `most`. Plain integers, in lists: for so few, arrays
    would take longer than a fast disk leaves time for."""
    at, stop = first, min(first + most, len(slots))
    buffers, begin = list[slice](), host_ids[first]
    while (at := at + 1) < stop and slots[at] == slots[at - 1] + 1:
        if host_ids[at] != host_ids[at - 1] + 1:
            if len(buffers) == MAX_BUFFERS - 1:
                break
            buffers.append(slice(begin, host_ids[at - 1] + 1))
            begin = host_ids[at]
    buffers.append(slice(begin, host_ids[at - 1] + 1))
    return Stretch(first, at - first, slots[first], tuple(buffers))


def neighbours(slots: Sequence[int]) -> Iterator[slice]:
    """The parts of a job whose slots follow each other."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield slice(first, at)
            first = at

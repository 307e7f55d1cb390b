"""The piece size that decides between copy engine and kernel, measured once on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import numpy as np

from ....arguments import check_int
from ....core.hops import Direction
from ....errors import ConfigError
from .driver import Pieces

__all__ = ["PUBLISHED", "BreakEven", "Trial", "measure_break_even"]

SIZES = tuple(kib * 1024 for kib in (4, 8, 16, 24, 32, 48, 64, 128))
"""Sizes tried in turn. From the last one on, the copy engine is faster in all published measurements."""
NUM_ROUNDS = 5


@attrs.frozen
class BreakEven:
    """The kernel copies pieces below these sizes, the copy engine all others. 0: the kernel copies none."""

    load_bytes: int
    store_bytes: int

    def __attrs_post_init__(self) -> None:
        check_int("load_bytes", self.load_bytes, 0, error=ConfigError)
        check_int("store_bytes", self.store_bytes, 0, error=ConfigError)

    def of(self, direction: Direction) -> int:
        return self.load_bytes if direction is Direction.LOAD else self.store_bytes


PUBLISHED = BreakEven(28 * 1024, 28 * 1024)
"""A published measurement on an H100."""

Trial = Callable[[Direction, Pieces], object]
"""Copies pieces and returns when they have arrived."""


def measure_break_even(
    by_engine: Trial,
    by_kernel: Trial,
    pieces_of: Callable[[Direction, int], Pieces],
    clock: Callable[[], float] = time.perf_counter,
) -> BreakEven:
    """The size from which on the copy engine is faster, per direction. `pieces_of(direction, size)` returns the pieces
    to measure with. Engine and kernel take turns, so that other load on the machine slows both."""
    found = {direction: _from(direction, by_engine, by_kernel, pieces_of, clock) for direction in Direction}
    return BreakEven(found[Direction.LOAD], found[Direction.STORE])


def _from(
    direction: Direction,
    by_engine: Trial,
    by_kernel: Trial,
    pieces_of: Callable[[Direction, int], Pieces],
    clock: Callable[[], float],
) -> int:
    lowest = 0
    for size in SIZES:
        pieces = pieces_of(direction, size)
        times: dict[Trial, list[float]] = {by_engine: [], by_kernel: []}
        for number in range(NUM_ROUNDS + 1):
            for trial in (by_engine, by_kernel):
                began_s = clock()
                trial(direction, pieces)
                if number:  # the first one compiles and warms up
                    times[trial].append(clock() - began_s)
        if np.median(times[by_kernel]) < np.median(times[by_engine]):
            lowest = size + 1  # this size is the kernel's, too
    return lowest

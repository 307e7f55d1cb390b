"""The piece size that decides between copy engine and kernel, measured once on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import numpy as np

from ...._common.arguments import check_int
from ...._kernel.states import Direction
from ....errors import ConfigError
from .driver import Pieces

SIZES = tuple(kib * 1024 for kib in (4, 8, 16, 24, 32, 48, 64, 128))
"""Sizes tried in turn. From the last one on, the copy engine is faster in all published measurements."""
NUM_ROUNDS = 5
MARGIN = 1.5
"""How many times faster the kernel has to be. It takes multiprocessors from the forward, which an idle device does not
show when it is measured; the copy engine takes none."""


@attrs.frozen
class BreakEven:
    """The kernel copies pieces below these sizes, the copy engine all others. 0: the kernel copies none.

    What is measured has `store_bytes=0`, because no request waits for a store: the forward keeps its multiprocessors.
    """

    load_bytes: int
    store_bytes: int

    def __attrs_post_init__(self) -> None:
        check_int("load_bytes", self.load_bytes, 0, error=ConfigError)
        check_int("store_bytes", self.store_bytes, 0, error=ConfigError)

    def of(self, direction: Direction) -> int:
        return self.load_bytes if direction is Direction.LOAD else self.store_bytes


PUBLISHED = BreakEven(28 * 1024, 28 * 1024)
"""A published measurement on an H100, where both took the same time."""

Trial = Callable[[Pieces], object]
"""Copies pieces and returns when they have arrived."""


def measure_break_even(
    by_engine: Trial,
    by_kernel: Trial,
    pieces_of: Callable[[int], Pieces],
    clock: Callable[[], float] = time.perf_counter,
) -> BreakEven:
    """The size up to which the kernel loads pieces `MARGIN` times faster, measured with what `pieces_of(size)` returns.
    Engine and kernel take turns, so that other load on the machine slows both."""
    load_bytes = 0
    for size in SIZES:
        pieces = pieces_of(size)
        times: dict[Trial, list[float]] = {by_engine: [], by_kernel: []}
        for number in range(NUM_ROUNDS + 1):
            for trial in (by_engine, by_kernel):
                began_s = clock()
                trial(pieces)
                if number:  # the first one compiles and warms up
                    times[trial].append(clock() - began_s)
        if MARGIN * np.median(times[by_kernel]) > np.median(times[by_engine]):
            break
        load_bytes = size + 1  # this size is the kernel's, too
    return BreakEven(load_bytes, 0)

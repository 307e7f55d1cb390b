"""Which copies are made at once, by the thread that launches them.

Handing a job to a copy thread and back costs a few microseconds when the process is idle, and many times that while the
event loop holds the interpreter lock. A small copy costs less than that, so it is made in `launch`. Its completion goes
the usual way and is settled in the next turn of the loop. Three bounds keep the loop responsive: the size of one copy,
which is measured when the transport opens, and the bytes and the number of copies in one turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import attrs
import numpy as np

__all__ = ["MOST_BYTES", "TURN_BYTES", "TURN_COPIES", "AtOnce", "hand_over_bytes"]

MOST_BYTES = 64 * 1024
"""Larger copies go to a thread, however slow the threads of the machine are."""
TURN_BYTES = 512 * 1024
"""Maximum bytes copied at once in one turn of the event loop. Copying them takes some 50 microseconds."""
TURN_COPIES = 128
"""Maximum copies made at once in one turn, because each costs some 15 microseconds, however small it is."""
NUM_ROUNDS = 15
MOST_S = 0.005
"""No round is begun later: where other threads compute, handing over takes tens of milliseconds."""
SAMPLE_BYTES = 2**20


@attrs.define
class AtOnce:
    """The bounds on copies that `launch` makes itself. No copy is made before the first `begin_turn`, because only a
    caller that settles completions in turns calls it."""

    most_bytes: int = 0
    """Of one copy. 0: no copy is made at once."""
    _left_bytes: int = attrs.field(init=False, default=0)
    _left_copies: int = attrs.field(init=False, default=0)

    def begin_turn(self) -> None:
        self._left_bytes, self._left_copies = TURN_BYTES, TURN_COPIES

    def allows(self, num_bytes: int) -> bool:
        return num_bytes <= self.most_bytes and num_bytes <= self._left_bytes and self._left_copies > 0

    def copied(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        self._left_copies -= 1


def hand_over_bytes(hand_over: Callable[[], object]) -> int:
    """How many bytes a thread copies in the time that `hand_over` takes, at most `MOST_BYTES`. `hand_over` hands a job
    to another thread and waits for the answer. Takes about a millisecond, or one hand-over."""
    source = np.ones(SAMPLE_BYTES, dtype=np.uint8)
    destination = np.ones_like(source)
    handed: list[float] = []
    copied: list[float] = []
    end_s = time.perf_counter() + MOST_S
    while not handed or (len(handed) < NUM_ROUNDS and time.perf_counter() < end_s):
        began_s = time.perf_counter()
        hand_over()
        handed.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        np.copyto(destination, source)
        copied.append(time.perf_counter() - began_s)
    return min(MOST_BYTES, int(SAMPLE_BYTES * statistics.median(handed) / max(1e-9, statistics.median(copied))))

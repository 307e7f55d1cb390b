"""The cost of the short switch interval: during copies, threads request the interpreter lock every 10 us.

Two threads compute in Python, which is the worst case, because neither ever releases the lock by itself. They are
compared with two threads that call numpy, like a forward and an event loop.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from aoffload._transfer.turns import SWITCH_S

from .harness import Row, Sample, interleave
from .peer import Peer

__all__ = ["run", "switching_rows"]

NUM_LOOPS = 400_000
NUM_CALLS = 4_000
SECONDS = 4.0


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """The time of the same work with the short interval, relative to the default one."""
    yield from switching_rows()


def switching_rows(num_loops: int = NUM_LOOPS, num_calls: int = NUM_CALLS, seconds: float = SECONDS) -> Iterator[Row]:
    matrix, default_s = np.ones((64, 64)), sys.getswitchinterval()

    def python() -> None:
        for _ in range(num_loops):
            pass

    def calls() -> None:
        for _ in range(num_calls):
            matrix @ matrix

    for name, work in (("two threads in Python", python), ("two threads that call numpy", calls)):
        subjects = {"short": partial(_timed, work, SWITCH_S), "default": partial(_timed, work, default_s)}
        found = interleave(subjects, seconds=seconds)
        short, usual = found["short"], found["default"]
        yield Row(
            name=f"{name}, switch interval of {SWITCH_S * 1e6:.0f} us", value=short.median_s * 1e3, unit="ms",
            spread=short.spread, against=f"of {default_s * 1e3:.0f} ms", limit=usual.median_s * 1e3,
            ratio=short.median_s / usual.median_s,
        )  # fmt: skip


def _timed(work: Callable[[], None], interval_s: float) -> Sample:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        wall = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s = time.perf_counter() - wall
    finally:
        sys.setswitchinterval(before_s)
    return Sample(wall_s, wall_s)

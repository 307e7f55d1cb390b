"""The protocol of a peer's process: one JSON object per line, in and out. Plain Python, for any peer's environment."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["serve", "timed", "timed_once"]


def timed_once(work: Callable[[], object]) -> dict[str, float]:
    """Do `work` once. Returns seconds of wall time, and of CPU time of this thread."""
    cpu, wall = time.thread_time(), time.perf_counter()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.thread_time() - cpu}


def timed(work: Callable[[], object], least_s: float) -> dict[str, float]:
    """Repeat `work` for `least_s`, an even number of times. Returns, for one call, seconds of wall time and of CPU time
    of this thread."""
    cpu, wall = time.thread_time(), time.perf_counter()
    work()
    number = 1
    while (took := time.perf_counter() - wall) < least_s or number % 2:
        work()
        number += 1
    return {"wall_s": took / number, "cpu_s": (time.thread_time() - cpu) / number}


def serve(calls: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls until the input ends. All other output of the peer goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        found = calls[asked.pop("call")](**asked)
        gc.collect()  # before the answer: after it others are timed, and collecting so large a heap would slow them
        gc.freeze()
        print(json.dumps(found), file=answers)

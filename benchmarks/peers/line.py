"""What a peer's process speaks: a JSON object a line in, one out. Plain Python: it runs in every peer's environment."""

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
    """Do `work` once: seconds on the wall, and of CPU time of this thread."""
    cpu, wall = time.thread_time(), time.perf_counter()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.thread_time() - cpu}


def timed(work: Callable[[], object], least_s: float) -> dict[str, float]:
    """Do `work` over and over for `least_s`, an even number of times; what one took: seconds on the wall, and of CPU
    time of this thread."""
    cpu, wall = time.thread_time(), time.perf_counter()
    work()
    number = 1
    while (took := time.perf_counter() - wall) < least_s or number % 2:
        work()
        number += 1
    return {"wall_s": took / number, "cpu_s": (time.thread_time() - cpu) / number}


def serve(calls: Mapping[str, Callable[..., Any]]) -> None:
    """Answer until the input ends. Whatever else the peer prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        found = calls[asked.pop("call")](**asked)
        gc.collect()  # before the answer: behind it others are timed, whom a collection of so large a heap slows
        gc.freeze()
        print(json.dumps(found), file=answers)

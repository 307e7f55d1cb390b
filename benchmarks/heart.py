"""A heartbeat in an event loop: measures the delay of each beat."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import numpy as np

__all__ = ["Heart"]

BEAT_S = 0.001
Found = TypeVar("Found")


class Heart:
    """Beats every millisecond while `beating`. `late_s` has the delay of each beat."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._is_stopped = False

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[Callable[[], None]]:
        """Beat until the block ends, or until the yielded function is called."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._beat)
            yield self._stop
            group.cancel_scope.cancel()

    async def during(self, work: Awaitable[Found]) -> Found:
        async with self.beating():
            return await work

    async def _beat(self) -> None:
        while not self._is_stopped:
            expected = time.perf_counter() + BEAT_S
            await anyio.sleep(BEAT_S)
            self.late_s.append(time.perf_counter() - expected)

    def _stop(self) -> None:
        self._is_stopped = True

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.late_s, 99)) * 1e3

    @property
    def longest_ms(self) -> float:
        return max(self.late_s) * 1e3

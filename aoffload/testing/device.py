"""A device that computes later: a stream that runs work in order, and fences in it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import anyio
import attrs

from .scheduler import Scheduler

__all__ = ["SimulatedFence", "Stream"]


@attrs.define(eq=False)
class SimulatedFence:
    """Passes once, and then makes the calls that wait for it."""

    has_passed: bool = False
    _waiting: list[Callable[[], None]] = attrs.field(factory=list)

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        assert self.has_passed, "no simulated thread may block"

    def when_passed(self, call: Callable[[], None]) -> None:
        if self.has_passed:
            call()
        else:
            self._waiting.append(call)

    def let_pass(self) -> None:
        self.has_passed = True
        for call in self._waiting:
            call()
        self._waiting.clear()


class Stream:
    """Runs work in the order of submission, each piece at its own later step. Fences and poison that follow a piece run
    in the same step."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self._scheduler = scheduler
        self._random = rng
        self._queue: deque[tuple[str, Callable[[], None]]] = deque()

    def submit(self, name: str, run: Callable[[], None]) -> None:
        self._queue.append((name, run))
        if len(self._queue) == 1:
            self._schedule()

    def fence(self) -> SimulatedFence:
        """A fence behind everything submitted so far."""
        fence = SimulatedFence(has_passed=not self._queue)
        if self._queue:
            self.submit("fence", fence.let_pass)
        return fence

    async def wait_idle(self) -> None:
        """Wait until everything that was submitted so far is over."""
        over = anyio.Event()
        self.fence().when_passed(over.set)
        await over.wait()

    def _schedule(self) -> None:
        delay_s = self._random.choice((0.0, 0.0, 0.002))
        self._scheduler.act(f"stream: {self._queue[0][0]}", self._run_oldest, delay_s)

    def _run_oldest(self) -> None:
        while self._queue:
            _, run = self._queue[0]
            run()
            self._queue.popleft()
            if self._queue and self._queue[0][0] not in ("fence", "poison"):
                self._schedule()
                return

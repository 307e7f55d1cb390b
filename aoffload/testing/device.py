"""A device that computes later: a stream that runs work in order, and its fences."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

import anyio
import attrs

from .scheduler import Scheduler

__all__ = ["SimulatedFence", "Stream"]


@attrs.define(eq=False)
class SimulatedFence:
    """A fence that passes once, and then makes the calls that wait for it."""

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


@attrs.define(eq=False)
class Piece:
    """A piece of work on a stream."""

    name: str
    run: Callable[[], None]
    blocks: frozenset[int] = frozenset()
    """The blocks that it reads or writes."""
    afterwards: list[Callable[[], None]] = attrs.field(factory=list)
    """Calls directly after it, before the scheduler runs anything else."""


class Stream:
    """Runs work in the order of submission, each piece in a scheduler action of its own. Fences after a piece, and its
    `afterwards`, run in the same action."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self._scheduler = scheduler
        self._random = rng
        self._queue: deque[Piece] = deque()

    def submit(self, name: str, run: Callable[[], None], blocks: Iterable[int] = ()) -> None:
        """Run `run`, which touches `blocks`, after everything submitted so far."""
        self._queue.append(Piece(name, run, frozenset(blocks)))
        if len(self._queue) == 1:
            self._schedule()

    def after_uses_of(self, block_id: int, run: Callable[[], None]) -> None:
        """Run `run` after the last piece that touches the block, or at once if none is left. Pieces submitted later do
        not delay it."""
        for piece in reversed(self._queue):
            if block_id in piece.blocks:
                piece.afterwards.append(run)
                return
        run()

    def fence(self) -> SimulatedFence:
        """A fence after everything submitted so far."""
        fence = SimulatedFence(has_passed=not self._queue)
        if self._queue:
            self.submit("fence", fence.let_pass)
        return fence

    async def wait_idle(self) -> None:
        """Wait until everything that was submitted so far has ended."""
        over = anyio.Event()
        self.fence().when_passed(over.set)
        await over.wait()

    def _schedule(self) -> None:
        delay_s = self._random.choice((0.0, 0.0, 0.002))
        self._scheduler.act(f"stream: {self._queue[0].name}", self._run_oldest, delay_s)

    def _run_oldest(self) -> None:
        while self._queue:
            piece = self._queue[0]
            piece.run()
            for run in piece.afterwards:
                run()
            self._queue.popleft()
            if self._queue and self._queue[0].name != "fence":
                self._schedule()
                return

"""A simulated `Env`: threads and wake-ups are actors of the scheduler, and time is the scheduler's clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import anyio
import attrs

from .._common.env import Env
from .scheduler import Scheduler
from .violations import Violation

__all__ = ["SimulatedEnv"]

Result = TypeVar("Result")


@attrs.define(eq=False)
class SimulatedEnv(Env):
    """Simulated clock, randomness and threads of a runtime."""

    scheduler: Scheduler = attrs.field(kw_only=True)
    delays: random.Random = attrs.field(kw_only=True)
    others: Callable[[int], None] = attrs.field(default=lambda num_steps: None, kw_only=True)
    """Runs up to this number of steps of other actors. Only asyncio's loop can do that; on trio, the work of a thread
    is one step."""

    def now(self) -> float:
        return self.scheduler.now

    def loop_clock(self) -> Callable[[], float]:
        return self.now

    def loop_waker(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Each wake-up is a step of its own, which the chooser may delay."""
        return lambda: self.scheduler.act("wake-up", callback)

    def meanwhile(self) -> None:
        """Called in the middle of a thread's work: the loop runs a few steps."""
        self.others(self.delays.choice((0, 0, 0, 1, 2, 5, 12)))

    async def run_in_thread(
        self, function: Callable[[], Result], limiter: anyio.CapacityLimiter | None = None
    ) -> Result:
        """Run `function` as in a worker thread, at a step of its own. The result arrives at another step.

        Scoped cancellation waits for the thread. Native cancellation leaves the thread running.
        """
        await anyio.lowlevel.checkpoint()
        over = anyio.Event()
        results: list[Result] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(function())
            except Violation:
                raise  # the waiting task may have ended
            except Exception as error:  # noqa: BLE001 - raised again in the task that waits
                errors.append(error)
            self.scheduler.act("thread ends", over.set)

        self.scheduler.act("thread works", work, self.delays.choice((0.0, 0.0, 0.001, 0.01)))
        with anyio.CancelScope(shield=True):
            await over.wait()
        if errors:
            raise errors[0]
        return results[0]

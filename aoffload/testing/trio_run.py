"""trio under the scheduler: one task per step instead of trio's batches, and a clock that jumps.

Trio steps every runnable task once per batch, in random order, so no task can get two steps ahead of another. Its queue
of runnable tasks is replaced by one that returns a single picked task at a time. That queue is not public. This module
checks that it exists, and no other module uses it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import trio
import trio.abc
from trio._core._run import GLOBAL_RUN_CONTEXT

from .scheduler import Scheduler

__all__ = ["run_trio"]

Result = TypeVar("Result")


class PickedQueue:
    """Replaces trio's queue: each iteration returns one picked task."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._actors: dict[trio.lowlevel.Task, int] = {}

    def append(self, task: trio.lowlevel.Task) -> None:
        actor = self._actors.get(task)
        if actor is None:
            actor = self._actors[task] = self._scheduler.new_actor()
        self._scheduler.add(actor, task.name, task)

    def __len__(self) -> int:
        return self._scheduler.num_ready

    def __iter__(self) -> Iterator[trio.lowlevel.Task]:
        """The task to run now. A step that belongs to no task runs here, outside any task."""
        scheduler = self._scheduler
        scheduler.after_step()
        if not scheduler.num_ready:
            return
        scheduler.before_step()
        option = scheduler.pick()
        if isinstance(option.run, trio.lowlevel.Task):
            yield option.run
        else:
            option.run()  # type: ignore[operator]

    def clear(self) -> None:
        """The picked option is off the list already."""


class SimulatedClock(trio.abc.Clock):
    """A clock that jumps: trio asks it how long to sleep only when no task can run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._polled_at = -1

    def start_clock(self) -> None:
        """Start at the scheduler's time."""

    def current_time(self) -> float:
        return self._scheduler.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if self._polled_at != self._scheduler.step:
            self._polled_at = self._scheduler.step  # trio wakes itself through a socket, so let it read that first
            return 0.0
        self._scheduler.advance(deadline)
        return 0.0


class ReplaceQueue(trio.abc.Instrument):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def before_run(self) -> None:
        runner = GLOBAL_RUN_CONTEXT.runner
        assert not runner.runq, "trio keeps its runnable tasks elsewhere than this was written for"
        runner.runq = PickedQueue(self._scheduler)  # type: ignore[assignment]


def run_trio(scheduler: Scheduler, function: Callable[[], Awaitable[Result]]) -> Result:
    """`trio.run` under `scheduler`. Errors of the scheduler or a hook are raised as they are, not wrapped by trio."""

    async def main() -> Any:
        return await function()

    try:
        return trio.run(main, clock=SimulatedClock(scheduler), instruments=[ReplaceQueue(scheduler)])  # type: ignore[no-any-return]
    except trio.TrioInternalError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise

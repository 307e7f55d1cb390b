"""asyncio under the scheduler: an event loop without sockets, threads or a clock of its own."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from .scheduler import FOREVER, Scheduler

__all__ = ["SimulatedLoop"]

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
MOST_QUIET_BATCHES = 4
"""Number of batches of plain callbacks without a ready task after which time passes anyway. At every turn, anyio asks
the tasks of a cancelled scope again to end, as long as one of them does not."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Picks the steps of tasks one at a time. Plain callbacks run in order before each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._callbacks: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._actors: dict[asyncio.Task[Any], int] = {}
        self._is_running = self._is_closed = self._is_stopping = False
        self.errors: list[dict[str, Any]] = []
        """The contexts that were passed to the exception handler."""

    # -- API for programs -----------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._scheduler.now

    def call_soon(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        task = getattr(callback, "__self__", None)
        if isinstance(task, asyncio.Task):
            self._scheduler.add(self._actor_of(task), task.get_name(), handle)
        else:
            self._callbacks.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when their time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Result], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Result]:
        return asyncio.Task(coro, loop=self, name=name or getattr(coro, "__name__", "task"), context=context)

    def get_task_factory(self) -> None:
        """Only `create_task` makes tasks."""

    def _actor_of(self, task: asyncio.Task[Any]) -> int:
        """The task's number, assigned when its first step is scheduled: at its creation."""
        if task not in self._actors:
            self._actors[task] = self._scheduler.new_actor()
        return self._actors[task]

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    async def shutdown_asyncgens(self) -> None:
        """The loop tracks none."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's own
        """The loop has none."""

    def stop(self) -> None:
        self._is_stopping = True

    def close(self) -> None:
        self._is_closed = True

    # -- running --------------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(lambda _: self.stop())
        self.run_forever()
        return task.result()

    def run_forever(self) -> None:
        self._is_stopping, self._is_running = False, True
        asyncio._set_running_loop(self)
        try:
            while not self._is_stopping:
                self._turn()
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)

    @property
    def unfinished(self) -> list[str]:
        """Names of tasks that have not ended, in the order of their creation."""
        return [task.get_name() for task in self._actors if not task.done()]

    def _turn(self) -> None:
        scheduler = self._scheduler
        self._run_callbacks()
        if not scheduler.num_ready:
            for _ in range(MOST_QUIET_BATCHES):
                if not self._callbacks or scheduler.num_ready or self._is_stopping:
                    break
                self._run_callbacks()
        if self._is_stopping:
            return
        if not scheduler.num_ready:
            scheduler.advance(self._next_timer())
            self._run_timers()
            return
        scheduler.before_step()
        option = scheduler.pick()
        if isinstance(option.run, asyncio.Handle):
            if not option.run.cancelled():
                option.run._run()
        else:
            option.run()  # type: ignore[operator]
        scheduler.after_step()
        self._run_timers()

    def step_others(self, num_steps: int) -> None:
        """Run up to that many ready steps, from within a step that belongs to no task. No time passes."""
        for _ in range(num_steps if asyncio.current_task(self) is None else 0):
            if self._is_stopping or not self._scheduler.num_ready:
                return
            self._turn()

    def _run_callbacks(self) -> None:
        for _ in range(len(self._callbacks)):
            handle = self._callbacks.popleft()
            if not handle.cancelled():
                handle._run()

    def _run_timers(self) -> None:
        """Run the timers that are due: several, if the clock has leapt."""
        while self._timers and self._timers[0][0] <= self._scheduler.now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                timer._run()

    def _next_timer(self) -> float:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else FOREVER

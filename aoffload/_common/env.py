"""The environment of the runtime: the event loop, the clock, randomness and threads. A simulator replaces them.

All differences between asyncio and trio that anyio does not hide are here: a clock and a current task that can be read
outside of a task, a timer without a task, and a wake-up from any thread.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
import attrs

from .arguments import check_type

__all__ = ["Env"]

Result = TypeVar("Result")


@attrs.define(eq=False)
class Env:
    """Clock, randomness and threads for the runtime and its transports."""

    random: random.Random = attrs.field(factory=random.Random)

    def __attrs_post_init__(self) -> None:
        check_type("random", self.random, random.Random)

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Start a daemon thread, so that a copy that hangs does not keep the process alive."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    async def run_in_thread(
        self, function: Callable[[], Result], limiter: anyio.CapacityLimiter | None = None
    ) -> Result:
        """Run `function` in a worker thread; returns its result.

        If a cancel scope cancels the call, the call still waits for the thread. Native task cancellation does not wait.
        """
        return await anyio.to_thread.run_sync(function, limiter=limiter)

    def loop_clock(self) -> Callable[[], float]:
        """The clock of cancel scopes in the running event loop. The returned function also works outside of a task."""
        if _in_trio():
            import trio

            return trio.current_time
        return asyncio.get_running_loop().time

    def call_at(self, deadline: float, function: Callable[[], None]) -> Callable[[], object]:
        """Make the running event loop call `function` when `loop_clock` reaches `deadline`. `function` must not raise.

        Returns a function that cancels the call.
        """
        if not _in_trio():
            return asyncio.get_running_loop().call_at(deadline, function).cancel
        import trio

        scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                await trio.sleep_until(deadline)
                function()

        trio.lowlevel.spawn_system_task(wait, name="aoffload timer")
        return scope.cancel

    def running_loop(self) -> object:
        """The running event loop, as an object that is compared by identity."""
        if not _in_trio():
            return asyncio.get_running_loop()
        import trio

        return trio.lowlevel.current_trio_token()

    def running_task(self) -> Callable[[], object]:
        """A function that returns the current task of the running event loop."""
        if _in_trio():
            import trio

            return trio.lowlevel.current_task
        return asyncio.current_task

    def loop_waker(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that makes the running event loop call `callback` soon. Any thread may call it.

        The function does nothing once the loop has closed. Closing the runtime drains the reports before that.
        """
        if _in_trio():
            return self._trio_waker(callback)
        loop = asyncio.get_running_loop()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(callback)
            except RuntimeError:  # the loop is closed
                return

        return wake

    def _trio_waker(self, callback: Callable[[], None]) -> Callable[[], None]:
        import trio

        token = trio.lowlevel.current_trio_token()

        def wake() -> None:
            try:
                token.run_sync_soon(callback)
            except trio.RunFinishedError:
                return

        return wake


def _in_trio() -> bool:
    """Checked before asyncio: in a guest run of trio, an asyncio loop is running as well."""
    trio = sys.modules.get("trio")
    if trio is None:
        return False
    try:  # in_trio_task() is newer than the oldest trio that a program may have imported
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True

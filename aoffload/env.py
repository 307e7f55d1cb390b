"""The seam to the world: clock, randomness, threads. A simulator replaces it."""

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
    """What the shell and the transports take from outside, and from nowhere else."""

    random: random.Random = attrs.field(factory=random.Random)

    def __attrs_post_init__(self) -> None:
        check_type("random", self.random, random.Random)

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Start a daemon thread: a copy that hangs must not keep the process alive."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    async def run_in_thread(
        self, function: Callable[[], Result], limiter: anyio.CapacityLimiter | None = None
    ) -> Result:
        """The result of `function`, called in a worker thread. Scoped cancellation waits for it; native doesn't."""
        return await anyio.to_thread.run_sync(function, limiter=limiter)

    def loop_clock(self) -> Callable[[], float]:
        """The clock that cancel scopes in the event loop running now go by; also good outside of a task."""
        if _in_trio():
            import trio

            return trio.current_time
        return asyncio.get_running_loop().time

    def call_at(self, deadline: float, function: Callable[[], None]) -> Callable[[], object]:
        """Have the event loop running now call `function`, which must not raise, when `loop_clock` is at `deadline`.
        The function that is returned calls it off."""
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

    def running_task(self) -> Callable[[], object]:
        """A function that returns the task it is called in, for the event loop running now."""
        if _in_trio():
            import trio

            return trio.lowlevel.current_task
        return asyncio.current_task

    def loop_waker(self, callback: Callable[[], None]) -> Callable[[], None]:
        """A function that any thread may call to have `callback` run soon in the event loop running now.

        Calling it after the loop has closed does nothing: who closes the loop drains what was reported by then.
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
    """Asked first: in a guest run of trio, there is a running asyncio loop as well."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())

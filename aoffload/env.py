"""The seam to the world: clock, randomness, threads. A simulator replaces it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import attrs

__all__ = ["Env"]


@attrs.define(eq=False)
class Env:
    """What the shell and the transports take from outside, and from nowhere else."""

    random: random.Random = attrs.field(factory=random.Random)

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.monotonic()

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Start a daemon thread: a copy that hangs must not keep the process alive."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def loop_waker(self, callback: Callable[[], None]) -> Callable[[], None]:
        """A function that any thread may call to have `callback` run soon in the event loop running now.

        Calling it after the loop has closed does nothing: who closes the loop drains what was reported by then.
        """
        try:
            import asyncio

            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._trio_waker(callback)

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

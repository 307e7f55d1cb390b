"""Calls that hang. Each has its own thread, but only one thread runs at a time, so a seed determines the story."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .simulated_disk import Crash

__all__ = ["HangingCall"]


class HangingCall:
    """Runs `work` until it ends or parks itself. `done` is called with its result, in the caller's thread."""

    def __init__(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self._work, self._done = work, done
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._result: Any = None
        self._error: BaseException | None = None
        self.is_over = self.was_parked = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> bool:
        """Let it run; whether it has ended. Raises what it raised."""
        self._go.release()
        self._back.acquire()
        if self.is_over:
            self._thread.join()
            if self._error is not None:
                raise self._error
            self._done(self._result)
        return self.is_over

    def end_with_its_process(self) -> None:
        """Its process is gone: the next call that it makes on the disk says so."""
        while not self.is_over:
            try:
                self.step()
            except Crash:
                return

    def park(self) -> None:
        """Called in its thread: wait until it may go on."""
        self.was_parked = True
        self._back.release()
        self._go.acquire()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error
        self.is_over = True
        self._back.release()

"""Whether a session is open, and the one thread of one process that it belongs to."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable

from .errors import AoffloadError, RuntimeClosed, WrongProcess, WrongThread
from .worker import CopyWorker

__all__ = ["BoundSession", "SessionLife"]


class SessionLife(enum.Enum):
    NEW = "new"
    """Also while it opens."""
    OPEN = "open"
    CLOSED = "closed"
    """Also while it closes."""


class BoundSession:
    """The part of a session that checks from where it is called."""

    def __init__(self, worker: CopyWorker) -> None:
        self.worker = worker
        self.life = SessionLife.NEW
        self._thread_id = 0
        self._process_id = 0

    @property
    def is_open(self) -> bool:
        return self.life is SessionLife.OPEN

    def bind(self) -> None:
        """Belong to this thread. `RuntimeClosed` the second time."""
        if self._process_id:
            raise RuntimeClosed("a runtime is entered once: make another one")
        self._thread_id, self._process_id = threading.get_ident(), os.getpid()

    def check_usable(self) -> None:
        """Raise unless the runtime is open and this is its process and thread."""
        if not self.is_open or os.getpid() != self._process_id or threading.get_ident() != self._thread_id:
            raise self._why_not()

    def _why_not(self) -> AoffloadError:
        if self._process_id and os.getpid() != self._process_id:
            return WrongProcess("the runtime belongs to the process it was opened in, not to a fork of it")
        if self.life is SessionLife.CLOSED:
            return RuntimeClosed("the runtime is closed: its `async with` block is over")
        if not self.is_open:
            return RuntimeClosed("the runtime is not open: use it inside its `async with` block")
        return WrongThread("call the runtime in its event loop's thread (anyio.from_thread.run_sync gets there)")

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Call `function` now in the event loop's thread; from another thread, have it called there soon."""
        if self._process_id and os.getpid() != self._process_id:
            raise self._why_not()
        if threading.get_ident() == self._thread_id:
            function()
        else:
            self.worker.call_soon(function)

    def call_later(self, function: Callable[[], None]) -> None:
        """For finalisers, which run in any thread, or in the middle of a ledger change. Does nothing once closed."""
        if self.is_open and os.getpid() == self._process_id:
            self.worker.call_soon(function)

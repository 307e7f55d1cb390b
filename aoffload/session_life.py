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
        self.is_over = False
        """Closing has ended: nothing changes any more, so any thread may read."""
        self.step_threads: set[int] = set()
        """Ids of the threads in which `run_step` calls its functions."""
        self._thread_id = 0
        self._process_id = 0
        self._loop: object = None

    @property
    def is_open(self) -> bool:
        return self.life is SessionLife.OPEN

    def bind(self, loop: object) -> None:
        """Open the session in this thread and its event loop. Raises `RuntimeClosed` the second time."""
        if self._process_id:
            raise RuntimeClosed("a runtime is entered once: make another one")
        self._thread_id, self._process_id, self._loop = threading.get_ident(), os.getpid(), loop

    @property
    def is_bound(self) -> bool:
        """Whether the session was ever opened."""
        return bool(self._process_id)

    @property
    def is_in_fork(self) -> bool:
        """Whether this process is a forked child, which has only a copy of the runtime and must not use it."""
        return bool(self._process_id) and os.getpid() != self._process_id

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is not the thread of the event loop."""
        return threading.get_ident() != self._thread_id

    def check_usable(self) -> None:
        """Raise unless the runtime is open and this is its process and thread."""
        if not self.is_open or os.getpid() != self._process_id or threading.get_ident() != self._thread_id:
            raise self._why_not()

    def check_may_look(self) -> None:
        """Raise if the runtime belongs to another process, or if another thread may be changing it. The runtime does
        not change before it is opened, nor after it is closed."""
        if self._process_id and not self.is_over and (self.is_in_fork or self.is_elsewhere):
            raise self._why_not_here()

    def check_loop(self, running: object) -> None:
        """Raise in any event loop other than that of the runtime, even in the same thread. No wait would end there,
        because completions wake the loop in which the runtime was opened."""
        if self.is_open and not self.is_in_fork and not self.is_elsewhere and running is not self._loop:
            raise WrongThread("the runtime belongs to the event loop that it was opened in: make one for each loop")

    def is_own_loop(self, running: object) -> bool:
        return running is self._loop

    def _why_not(self) -> AoffloadError:
        if self.is_in_fork:
            return self._why_not_here()
        if self.life is SessionLife.CLOSED:
            return RuntimeClosed("the runtime is closed: its `async with` block is over")
        if not self.is_open:
            return RuntimeClosed("the runtime is not open: use it inside its `async with` block")
        return self._why_not_here()

    def _why_not_here(self) -> AoffloadError:
        if self.is_in_fork:
            return WrongProcess("the runtime belongs to the process it was opened in, not to a fork of it")
        if threading.get_ident() in self.step_threads:
            return WrongThread(
                "the function of `run_step` runs in a worker thread, which may not call the runtime: read `block_ids`, "
                "and whatever else it needs, before `run_step`, and commit after it"
            )
        return WrongThread(
            "call the runtime in its event loop's thread: read `block_ids` there, before another thread begins to "
            "compute (anyio.from_thread.run_sync gets back there)"
        )

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Call `function` now in the event loop's thread; from another thread, have it called there soon."""
        if self.is_in_fork:
            raise self._why_not()
        if threading.get_ident() == self._thread_id:
            function()
        else:
            self.worker.call_soon(function)

    def leave_in_loop(self, function: Callable[[], None]) -> None:
        """As `call_in_loop`, for the end of a `with` block. In a forked child it does nothing, because the child owns
        nothing that has to end."""
        if not self.is_in_fork:
            self.call_in_loop(function)

    def call_later(self, function: Callable[[], None]) -> None:
        """For finalisers, which run in any thread, or in the middle of a ledger change. Does nothing once closed."""
        if self.is_open and os.getpid() == self._process_id:
            self.worker.call_soon(function)

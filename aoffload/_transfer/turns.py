"""Shortens the GIL switch interval, so that copy threads get the GIL while an event loop is never idle."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from .._common.env import Env
from ..errors import TransferRefused

SWITCH_S = 1e-5
"""Far less than a turn of the event loop. The waiting thread has to ask for the GIL in time: see `wait_precisely`."""
_SET_TIMER_SLACK = 29
"""`PR_SET_TIMERSLACK` of `prctl` on Linux: how many nanoseconds late a wait of the calling thread may end."""


class Turns:
    """Sets the GIL switch interval to `SWITCH_S` while copies of one transport are under way.

    An event loop with turns shorter than `sys.getswitchinterval()` (5 ms by default) starves other threads: each turn
    releases the GIL for a moment and takes it again before a waiting thread is awake, which then starts to wait anew.
    So copies make no progress. To prevent this, the loop's own thread shortens the interval when it launches a copy.
    The interval is global to the process. An interval that is already short is not changed. If another transport
    restores the interval too early, the next launch or end shortens it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_under_way = 0
        self._before_s: float | None = None

    def begin(self) -> None:
        """A copy is about to be launched."""
        with self._lock:
            self._num_under_way += 1
            self._shorten()

    def end(self) -> None:
        """A copy is over, or was refused. May come after `close`."""
        with self._lock:
            self._num_under_way = max(0, self._num_under_way - 1)
            if self._num_under_way:
                self._shorten()
            else:
                self._put_back()

    def close(self) -> None:
        """Restore the interval even with copies under way: a copy that hangs never ends."""
        with self._lock:
            self._num_under_way = 0
            self._put_back()

    def _shorten(self) -> None:
        now_s = sys.getswitchinterval()
        if now_s > SWITCH_S:
            self._before_s = now_s
            sys.setswitchinterval(SWITCH_S)

    def _put_back(self) -> None:
        if self._before_s is not None and sys.getswitchinterval() <= SWITCH_S:  # otherwise other code has set it
            sys.setswitchinterval(self._before_s)
        self._before_s = None


def wait_precisely() -> None:
    """Make timed waits of the calling thread end on time, for as long as the thread lives.

    A thread that waits for the GIL asks for it when the interval is over, and starts anew if the GIL was released
    meanwhile, if only for a moment. Linux ends such a wait up to 50 us late to save wake-ups, and so misses every turn
    of a loop with turns of 50 us. Where `prctl` is not available, copies only wait longer.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # no `prctl` to call
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1), 0, 0, 0)


def give_way() -> None:
    """Schedule the calling thread as SCHED_BATCH: when it is woken, it takes no core from a running thread. The thread
    that wakes it is about to submit work to a disk, which matters more. The calling thread keeps its share of the
    cores."""
    if sys.platform != "linux":
        return
    with suppress(OSError):  # a sandbox that does not allow it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def started_thread(env: Env, work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread of `env`. Raises `TransferRefused` if the system cannot start another thread; `work` then never
    runs."""
    try:
        return env.start_thread(work, name)
    except RuntimeError as error:
        raise TransferRefused(f"the thread {name} cannot be started: {error}") from error

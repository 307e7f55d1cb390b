"""How soon copy threads get the interpreter lock from an event loop that is never idle."""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import suppress

__all__ = ["SWITCH_S", "Turns", "wait_precisely"]

SWITCH_S = 1e-5
"""Far less than the turns of a loop. How soon it is asked for is up to the thread that waits: see `wait_precisely`."""
_SET_TIMER_SLACK = 29
"""Of `prctl` on Linux: how much later than asked, in nanoseconds, a wait of the calling thread may end."""


class Turns:
    """Has whoever holds the lock give it up within `SWITCH_S`, as long as copies of one transport are under way.

    Turns of a loop that are shorter than `sys.getswitchinterval()` (5 ms, unless a program sets another) let nobody
    else in: each gives the lock up for a moment and has it again before a waiting thread is awake, which then begins to
    wait anew. Copies beside such a loop stand still. So the interval is shortened by the loop's own thread, when it
    launches. It belongs to the whole process: who finds it short leaves it alone, and another transport that puts it
    back too early is corrected at the next launch or end.
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
        """It is over, or was refused. Also called for what has begun before `close`."""
        with self._lock:
            self._num_under_way = max(0, self._num_under_way - 1)
            if self._num_under_way:
                self._shorten()
            else:
                self._put_back()

    def close(self) -> None:
        """Put the interval back whatever is under way: a copy that hangs ends nowhere."""
        with self._lock:
            self._num_under_way = 0
            self._put_back()

    def _shorten(self) -> None:
        now_s = sys.getswitchinterval()
        if now_s > SWITCH_S:
            self._before_s = now_s
            sys.setswitchinterval(SWITCH_S)

    def _put_back(self) -> None:
        if self._before_s is not None and sys.getswitchinterval() <= SWITCH_S:  # else somebody else has set it
            sys.setswitchinterval(self._before_s)
        self._before_s = None


def wait_precisely() -> None:
    """Have timed waits of the calling thread end when they should, for as long as it lives.

    A thread that waits for the lock asks for it when the interval is over, and begins anew if the lock was given up
    meanwhile, if only for a moment. Linux ends such a wait up to 50 us late, to save wake-ups: behind the end of a
    loop's turn of 50 us, each time. Where this cannot be had, copies only wait longer.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # no library to ask
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1), 0, 0, 0)

"""SIGTERM and Ctrl-C for a process that ends on them, however many come."""

from __future__ import annotations

import signal
from types import FrameType

import anyio

from ..._common.env import Env

__all__ = ["EndSignals"]

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class EndSignals:
    """Takes SIGTERM and SIGINT from when it is made, in a running event loop, to the end of the process.

    The old handlers are not put back: a signal that comes while the process ends would kill it, and its exit status
    would not be 0.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._news = anyio.Event()
        self._wake = Env().loop_waker(self._tell)
        for number in NUMBERS:
            signal.signal(number, self._take)

    async def wait(self, num_signals: int) -> None:
        """Wait until so many signals have come in all."""
        while self._num_seen < num_signals:
            self._news = anyio.Event()
            await self._news.wait()

    def ignore(self) -> None:
        """Nothing listens for them any more, and none of them harms."""
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._num_seen += 1
        self._wake()

    def _tell(self) -> None:
        self._news.set()

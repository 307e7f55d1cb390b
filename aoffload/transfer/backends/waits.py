"""Whether calls that let go of the interpreter lock have to wait to get it back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from ..turns import SWITCH_S

__all__ = ["LockWaits"]


@attrs.define(eq=False)
class LockWaits:
    """What the last timed call of one thread spent neither copying nor computing, in seconds.

    That is time without the lock or without a core, and fewer calls help against both. Who waits for the lock waits
    `SWITCH_S` at least; who does not, some hundred nanoseconds.
    """

    last_s: float = 0.0

    @property
    def have_begun(self) -> bool:
        return self.last_s > SWITCH_S

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Around one call, or a few: the thread's own time has to be more than what it measures with."""
        began_s = time.perf_counter() - time.thread_time()
        yield
        self.last_s = time.perf_counter() - time.thread_time() - began_s

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
    """What the last timed calls of one thread spent neither copying nor computing, in seconds each.

    That is time without the lock or without a core, and fewer calls help against both. Who waits for the lock waits
    `SWITCH_S` at least; who does not, some hundred nanoseconds.
    """

    last_s: float = 0.0

    @property
    def have_begun(self) -> bool:
        return self.last_s > SWITCH_S

    @contextmanager
    def timing(self, num_calls: int) -> Iterator[None]:
        """Around `num_calls` calls."""
        began_s = time.perf_counter() - time.thread_time()
        yield
        self.last_s = (time.perf_counter() - time.thread_time() - began_s) / num_calls

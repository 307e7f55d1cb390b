"""Measures whether calls that release the GIL have to wait to reacquire it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from ..turns import SWITCH_S

__all__ = ["LockWaits"]


LARGE_SHARE = 0.2
"""Share of waiting that counts as contention: few of many small calls wait, but as long as all of them take."""


@attrs.define(eq=False)
class LockWaits:
    """Seconds per call that the last timed calls of one thread spent neither copying nor computing.

    That is time without the GIL or without a core, and fewer calls help against both. A wait for the GIL takes
    `SWITCH_S` at least; a call without a wait loses some hundred nanoseconds.
    """

    last_s: float = 0.0
    last_share: float = 0.0
    """Share of waiting in the time of those calls, including the time between them."""

    @property
    def have_begun(self) -> bool:
        return self.last_s > SWITCH_S or self.last_share > LARGE_SHARE

    @contextmanager
    def timing(self, num_calls: int) -> Iterator[None]:
        """Times the `num_calls` calls inside."""
        began_s, began_own_s = time.perf_counter(), time.thread_time()
        yield
        took_s = time.perf_counter() - began_s
        waited_s = took_s - (time.thread_time() - began_own_s)
        self.last_s, self.last_share = waited_s / num_calls, waited_s / took_s if took_s else 0.0

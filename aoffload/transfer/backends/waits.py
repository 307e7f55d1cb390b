"""Whether calls that let go of the interpreter lock have to wait to get it back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from ..turns import SWITCH_S

__all__ = ["LockWaits"]

LARGE_SHARE = 0.2
"""Of many small calls few have to wait, for as long as all of them take."""


@attrs.define(eq=False)
class LockWaits:
    """What the last timed calls of one thread spent neither copying nor computing, in seconds each.

    That is time without the lock or without a core, and fewer calls help against both. Who waits for the lock waits
    `SWITCH_S` at least; who does not, some hundred nanoseconds.
    """

    last_s: float = 0.0
    last_share: float = 0.0
    """Of the time that those calls took, with what lies between them."""

    @property
    def have_begun(self) -> bool:
        return self.last_s > SWITCH_S or self.last_share > LARGE_SHARE

    @contextmanager
    def timing(self, num_calls: int) -> Iterator[None]:
        """Around `num_calls` calls."""
        began_s, began_own_s = time.perf_counter(), time.thread_time()
        yield
        took_s = time.perf_counter() - began_s
        waited_s = took_s - (time.thread_time() - began_own_s)
        self.last_s, self.last_share = waited_s / num_calls, waited_s / took_s if took_s else 0.0

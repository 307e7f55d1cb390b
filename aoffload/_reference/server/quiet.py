"""Bounds what clients can make the process write to its log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from .errors import LOGGER

__all__ = ["BoundedLog", "bounded_logs"]

LOGGERS = ("uvicorn.error", "asyncio", LOGGER)
MAX_LINES = 5
PERIOD_S = 60.0
MAX_KINDS = 256
MAX_KIND = 32
"""Characters of a message that say its kind; asyncio puts addresses behind them."""


@attrs.define
class _Count:
    began_s: float
    num_lines: int = 0


@attrs.define(eq=False)
class BoundedLog:
    """A filter of `logging`: of each message at most `MAX_LINES` in `PERIOD_S`; the next one says how many were not
    written."""

    clock: Callable[[], float] = time.monotonic
    _counts: dict[tuple[str, str], _Count] = attrs.field(factory=dict, init=False)
    """By logger and the beginning of the format string."""

    def __call__(self, record: logging.LogRecord) -> bool:
        now = self.clock()
        if len(self._counts) >= MAX_KINDS:
            self._counts.clear()
        count = self._counts.setdefault((record.name, str(record.msg)[:MAX_KIND]), _Count(now))
        if now - count.began_s >= PERIOD_S:
            if count.num_lines > MAX_LINES:
                record.msg = f"{record.msg} (and {count.num_lines - MAX_LINES} more like it)"
            count.began_s, count.num_lines = now, 0
        count.num_lines += 1
        return count.num_lines <= MAX_LINES


@contextmanager
def bounded_logs() -> Iterator[None]:
    """Bound the loggers of the server and of what it is built on, for the duration of the block."""
    bound = BoundedLog()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(bound)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(bound)

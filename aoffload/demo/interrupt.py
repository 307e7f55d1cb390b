"""The terminal: progress, and Ctrl-C, which stops the demo in order, or at once if that takes too long. It never prints
a traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

import attrs

from .._common.commands import ProgressLine, bar

EXIT_STATUS = 130
REPORT_TIMEOUT_S = 0.3
PATIENCE_S = 1.2
"""Time limit for an orderly stop. A forward on a busy machine may run longer."""


@attrs.define(eq=False)
class Interrupt:
    """Handles SIGINT while it is entered.

    The handlers of asyncio and trio raise `KeyboardInterrupt` in the middle of any code. This one only wakes the event
    loop. While no loop runs (the model is being built, the report printed), nothing needs an orderly stop, and the
    handler leaves at once.
    """

    report: Callable[[], object]
    """Prints the results so far."""
    was_pressed: bool = False
    _reporting: threading.Lock = attrs.field(factory=threading.Lock)
    _has_reported: bool = False
    _stop: Callable[[], object] | None = None
    _old_handler: Any = None

    def __enter__(self) -> Interrupt:
        self._old_handler = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._old_handler)

    def stop_with(self, stop: Callable[[], object] | None) -> None:
        """Have Ctrl-C call `stop`. A signal handler calls it, so it may only wake the loop. None: leave at once."""
        self._stop = stop
        if stop is not None and self.was_pressed:
            stop()

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.was_pressed or self._stop is None:
            self.leave()
        self.was_pressed = True
        watchdog = threading.Timer(PATIENCE_S, self.leave)
        watchdog.daemon = True
        watchdog.start()
        self._stop()

    def report_once(self) -> None:
        """Report, unless that was done. The main thread and the watchdog may both call this."""
        if not self._reporting.acquire(timeout=REPORT_TIMEOUT_S):
            return  # a report is being made, perhaps in the frame that this signal handler interrupted
        try:
            if not self._has_reported:
                self._has_reported = True
                self.report()
        finally:
            self._reporting.release()

    def leave(self) -> NoReturn:
        """Report and end the process, without waiting for threads. Nothing raises any more."""
        self.was_pressed = True
        try:
            self.report_once()
            sys.stdout.flush()
        except Exception:  # noqa: BLE001 - a report cut short (print inside print, closed pipe) is all there can be
            pass
        finally:
            os._exit(EXIT_STATUS)


# -- progress --------------------------------------------------------------------------------------------------------
#
# The progress line: rewritten in place on a terminal, a few plain lines in a pipe. It goes to stderr.

BAR_WIDTH = 24


@attrs.define(eq=False)
class Progress:
    """Cheap to call at every step."""

    line: ProgressLine
    _title: str = ""
    _total: int = 0
    _last_quarter: int = 0

    def start(self, title: str, total: int) -> None:
        self._title, self._total, self._last_quarter = title, total, 0

    def update(self, num_done: int, detail: str) -> None:
        """Show `num_done` of the total, followed by `detail`."""
        total = max(1, self._total)
        about = f"{num_done}/{self._total} requests, {detail}"
        if self.line.is_terminal:
            self.line.show(lambda: f"{self._title:<16} {bar(num_done / total, BAR_WIDTH)} {about}")
        elif (quarter := 4 * num_done // total) > self._last_quarter:
            self._last_quarter = quarter
            self.line.print(f"{self._title}: {about}\n")

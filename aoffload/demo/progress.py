"""The progress line: rewritten in place on a terminal, a few plain lines in a pipe. Goes to stderr."""

from __future__ import annotations

import time
from typing import TextIO

import attrs

__all__ = ["Progress"]

INTERVAL_S = 0.1
BAR_WIDTH = 24


@attrs.define(eq=False)
class Progress:
    """Cheap to call at every step."""

    stream: TextIO
    _title: str = ""
    _total: int = 0
    _last_s: float = 0.0
    _last_quarter: int = 0
    _on_screen: bool = False

    def start(self, title: str, total: int) -> None:
        self._title, self._total, self._last_quarter, self._last_s = title, total, 0, 0.0

    def update(self, num_done: int, detail: str) -> None:
        """Show `num_done` of the total, followed by `detail`."""
        if self.stream.isatty():
            now = time.monotonic()
            if now - self._last_s >= INTERVAL_S:
                self._last_s = now
                self._rewrite(num_done, detail)
        elif (quarter := 4 * num_done // max(1, self._total)) > self._last_quarter:
            self._last_quarter = quarter
            self._print(f"{self._title}: {num_done}/{self._total} requests, {detail}\n")

    def clear(self) -> None:
        """Leave an empty line for other output."""
        if self._on_screen:
            self._on_screen = False
            self._print("\r\x1b[K")

    def _rewrite(self, num_done: int, detail: str) -> None:
        filled = BAR_WIDTH * num_done // max(1, self._total)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        self._print(f"\r{self._title:<16} [{bar}] {num_done}/{self._total} requests, {detail}\x1b[K")
        self._on_screen = True

    def _print(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()

"""How much of the log is read: one line on a terminal, rewritten in place, and nothing anywhere else."""

from __future__ import annotations

import time
from typing import TextIO

import attrs

__all__ = ["Progress"]

BAR_WIDTH = 30
INTERVAL_S = 0.1


@attrs.define(eq=False)
class Progress:
    stream: TextIO
    total_bytes: int = 0
    """Zero if the length of the log is unknown (standard input)."""
    _last_s: float = -1.0
    _on_screen: bool = False

    def update(self, num_bytes: int, num_lines: int) -> None:
        """Show how much is read. Cheap enough for every thousandth line."""
        if not self.stream.isatty():
            return
        now = time.monotonic()
        if now - self._last_s >= INTERVAL_S:
            self._last_s = now
            self._print(f"\rreading {self._bar(num_bytes)}{num_lines:,} lines\x1b[K")
            self._on_screen = True

    def clear(self) -> None:
        """Leave an empty line for other output."""
        if self._on_screen:
            self._on_screen = False
            self._print("\r\x1b[K")

    def _bar(self, num_bytes: int) -> str:
        if not self.total_bytes:
            return ""
        part = min(1.0, num_bytes / self.total_bytes)
        filled = int(BAR_WIDTH * part)
        return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {part:4.0%}  "

    def _print(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()

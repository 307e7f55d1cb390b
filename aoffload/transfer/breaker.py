"""What fails is left alone for a while: a disk, or one node of a store. What is not asked of it costs nobody time."""

from __future__ import annotations

import attrs

__all__ = ["Breaker"]

FIRST_S, LONGEST_S = 0.5, 30.0
PATIENCE = 2
"""Failures in a row that open it."""


@attrs.define(eq=False)
class Breaker:
    """Opens after two failures in a row, for half a second and then twice as long each time; a success closes it."""

    _num_failures: int = 0
    _until_s: float = 0.0

    def is_open(self, now: float) -> bool:
        """Whether to ask for nothing now."""
        return self.is_on_trial and now < self._until_s

    @property
    def is_on_trial(self) -> bool:
        """Whether it has opened and nothing has succeeded since: one attempt at a time is enough to find out."""
        return self._num_failures >= PATIENCE

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, now: float) -> None:
        """One more failure. Those that end while it is open began before: they do not count."""
        if self.is_open(now):
            return
        self._num_failures += 1
        num_times = self._num_failures - PATIENCE
        if num_times >= 0:
            self._until_s = now + min(LONGEST_S, FIRST_S * 2.0 ** min(num_times, 16))

"""How fast a hop has been of late, over the time in which anything of it was in flight."""

from __future__ import annotations

import math

import attrs

__all__ = ["TransferRate"]

KEEP = 0.8
"""Of what was measured before, at each end of a job."""
FRESH_S = 10.0
"""What nothing has confirmed for so long is unknown again, so that a tier that was slow is tried once more."""


@attrs.define(eq=False)
class TransferRate:
    """Bytes a second of one hop, all its jobs together. Times are seconds on one clock."""

    _num_bytes: float = 0.0
    _seconds: float = 0.0
    _since_s: float = 0.0
    """When a job has ended last, or the first one in flight has begun."""
    _ended_s: float = -math.inf

    def begins(self, now: float) -> None:
        """A job begins, and nothing else is in flight."""
        self._since_s = now
        if not self._is_fresh(now):
            self._num_bytes = self._seconds = 0.0

    def ended(self, num_bytes: int, now: float) -> None:
        """A job has ended that has moved so much."""
        self._num_bytes = KEEP * self._num_bytes + num_bytes
        self._seconds = KEEP * self._seconds + now - self._since_s
        self._since_s = self._ended_s = now

    def bytes_per_s(self, in_flight_bytes: int, now: float) -> float | None:
        """None: not known. What is in flight and does not end makes it ever smaller."""
        is_known = self._num_bytes > 0 < self._seconds and self._is_fresh(now)  # failures alone measure nothing
        measured = self._num_bytes / self._seconds if is_known else None
        waited_s = now - self._since_s
        if not in_flight_bytes or waited_s <= 0:
            return measured
        at_most = in_flight_bytes / waited_s
        return at_most if measured is None else min(measured, at_most)

    def _is_fresh(self, now: float) -> bool:
        return now - self._ended_s < FRESH_S

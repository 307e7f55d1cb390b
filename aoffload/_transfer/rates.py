"""How fast a link has been of late, over the time in which anything of it was in flight."""

from __future__ import annotations

import math

import attrs

KEEP = 0.8
"""Of what was measured before, at each end of a job."""
QUICKEST_FADES = 1.02
"""How much longer the quickest job seems to have taken, at each end of a job."""
FRESH_S = 10.0
"""What nothing has confirmed for so long is old: the next job says how fast the link has become."""


@attrs.define(eq=False)
class TransferRate:
    """Latency and bytes a second of one link, all its jobs together. Times are seconds on one clock.

    Both are those of the line through the quickest job of late and the average one: a small job takes little but its
    latency, and where all jobs are equal, latency is part of their rate.
    """

    latency_s: float = 0.0
    """Of a job, besides what its bytes take."""
    since_s: float = 0.0
    """When a job has ended last, or the first one in flight has begun."""
    ended_s: float = -math.inf
    """When a job has ended last."""
    _bytes_per_s: float | None = None
    _num_jobs: float = 0.0
    _num_bytes: float = 0.0
    _seconds: float = 0.0
    """These three fade alike."""
    _quickest_bytes: int = 0
    _quickest_s: float = math.inf
    _is_tried_again: bool = False
    """What was measured has become old, and the job that measures anew is in flight."""

    def begins(self, now: float) -> None:
        """A job begins, and nothing else is in flight."""
        self.since_s = now
        self._is_tried_again = self.is_old(now)

    def ended(self, num_bytes: int, now: float) -> None:
        """A job has ended that has moved so much."""
        took_s = now - self.since_s
        if self._is_tried_again:
            self._is_tried_again = False
            self._has_become(num_bytes, took_s)
        self.since_s = self.ended_s = now
        self._num_jobs = KEEP * self._num_jobs + 1.0
        self._num_bytes = KEEP * self._num_bytes + num_bytes
        self._seconds = KEEP * self._seconds + took_s
        self._quickest_s *= QUICKEST_FADES
        if num_bytes and took_s <= self._quickest_s:
            self._quickest_bytes, self._quickest_s = num_bytes, took_s
        self._measure()

    def _measure(self) -> None:
        if not self._num_bytes > 0 < self._seconds:
            self.latency_s, self._bytes_per_s = 0.0, None  # failures alone measure nothing
            return
        mean_bytes, mean_s = self._num_bytes / self._num_jobs, self._seconds / self._num_jobs
        more_bytes, latency_s = mean_bytes - self._quickest_bytes, 0.0
        if more_bytes > 0 and mean_s > self._quickest_s:
            latency_s = max(0.0, self._quickest_s - self._quickest_bytes * (mean_s - self._quickest_s) / more_bytes)
        self.latency_s, self._bytes_per_s = latency_s, mean_bytes / (mean_s - latency_s)

    def _has_become(self, num_bytes: int, took_s: float) -> None:
        """All that was measured is old, and took as much longer or shorter as this job does: a small one shows that of
        large ones, too."""
        if num_bytes and self._bytes_per_s:
            share = took_s / (self.latency_s + num_bytes / self._bytes_per_s)
            self._seconds, self._quickest_s = self._seconds * share, self._quickest_s * share

    def bytes_per_s(self, in_flight: int, now: float) -> float | None:
        """None: not known. So many bytes are in flight, and show that it is not faster than that."""
        known = self._bytes_per_s
        if known is None or not in_flight or known * (now - self.since_s) <= in_flight:
            return known
        return in_flight / (now - self.since_s)

    def is_old(self, now: float) -> bool:
        return now - self.ended_s >= FRESH_S

"""The recent speed of a link, measured over the time in which a copy was in flight."""

from __future__ import annotations

import math

import attrs

KEEP = 0.8
"""Weight of the earlier measurements at each end of a job."""
QUICKEST_FADES = 1.02
"""Factor by which the time of the quickest job grows at each end of a job."""
FRESH_S = 10.0
"""A measurement is old if no job has ended for this time. The next job then measures the speed anew."""


@attrs.define(eq=False)
class TransferRate:
    """Latency and bytes per second of one link, over all its jobs. Times are seconds on one clock.

    Both come from the straight line through the quickest recent job and the average job, because a small job takes
    little more than its latency. If all jobs have the same size, the latency is part of the rate.
    """

    latency_s: float = 0.0
    """Seconds that a job takes in addition to the time for its bytes."""
    since_s: float = 0.0
    """The time at which the last job ended, or the first one in flight began."""
    ended_s: float = -math.inf
    """The time at which the last job ended."""
    _bytes_per_s: float | None = None
    _num_jobs: float = 0.0
    _num_bytes: float = 0.0
    _seconds: float = 0.0
    """These three sums decay at the same rate."""
    _quickest_bytes: int = 0
    _quickest_s: float = math.inf
    _is_tried_again: bool = False
    """Whether the measurement is old and the job in flight replaces it."""

    def begins(self, now: float) -> None:
        """A job begins while nothing else is in flight."""
        self.since_s = now
        self._is_tried_again = self.is_old(now)

    def ended(self, num_bytes: int, now: float) -> None:
        """A job that moved `num_bytes` has ended."""
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
        """Rescale the old measurement by the ratio of this job's time to its expected time. Even a small job thus
        corrects the estimate for large jobs."""
        if num_bytes and self._bytes_per_s:
            share = took_s / (self.latency_s + num_bytes / self._bytes_per_s)
            self._seconds, self._quickest_s = self._seconds * share, self._quickest_s * share

    def bytes_per_s(self, in_flight: int, now: float) -> float | None:
        """The measured rate; None if unknown. `in_flight` bytes that have not arrived yet set an upper bound."""
        known = self._bytes_per_s
        if known is None or not in_flight or known * (now - self.since_s) <= in_flight:
            return known
        return in_flight / (now - self.since_s)

    def is_old(self, now: float) -> bool:
        return now - self.ended_s >= FRESH_S

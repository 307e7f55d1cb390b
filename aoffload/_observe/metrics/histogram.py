"""A histogram as plain numbers: adding a value costs one binary search, and a copy is read all at once."""

from __future__ import annotations

from bisect import bisect_left

import attrs

__all__ = ["SECONDS", "THROUGHPUT", "Histogram"]

SECONDS = (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds in seconds, from a turn of the event loop to a load that was given up and computed."""
THROUGHPUT = (1e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2e10, 4e10, 8e10)
"""Bounds in bytes per second, from a disk's to a device link's."""


@attrs.define
class Histogram:
    bounds: tuple[float, ...]
    """The highest value of each bucket but the last, which has no bound."""
    counts: list[int] = attrs.field(init=False)
    total: float = 0.0

    @counts.default
    def _no_counts(self) -> list[int]:
        return [0] * (len(self.bounds) + 1)

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        twin = Histogram(self.bounds)
        twin.counts, twin.total = self.counts[:], self.total
        return twin

    def cumulative(self) -> list[tuple[str, float]]:
        """Each bound, and how many values were not above it."""
        found: list[tuple[str, float]] = []
        num_below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            num_below += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(num_below)))
        return found

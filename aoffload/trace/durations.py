"""Percentiles of many durations in little memory."""

from __future__ import annotations

import math

import attrs

__all__ = ["Durations"]

_EXACT = 4_096
"""Up to this many durations are kept as they are."""
_GROWTH = math.log(1.01)
"""Each bucket is one percent wider than the one before, so its middle is within half a percent of its values."""
_FLOOR_S = 1e-7


@attrs.define(eq=False)
class Durations:
    """Exact for a few thousand; beyond that a histogram, and percentiles within half a percent."""

    num: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    _values: list[float] = attrs.field(factory=list)
    _buckets: dict[int, int] = attrs.field(factory=dict)

    def add(self, seconds: float) -> None:
        self.num += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)
        if self.num <= _EXACT:
            self._values.append(seconds)
            return
        for value in self._values:
            self._count(value)
        self._values.clear()
        self._count(seconds)

    def percentile(self, percent: float) -> float:
        """The smallest duration that `percent` percent of all durations do not exceed."""
        rank = max(1, math.ceil(self.num * percent / 100))
        if not self.num or rank == self.num:
            return self.max_s
        if self._values:
            return sorted(self._values)[rank - 1]
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(self.max_s, 0.0 if bucket < 0 else _FLOOR_S * math.exp((bucket + 0.5) * _GROWTH))
        return self.max_s

    def _count(self, seconds: float) -> None:
        bucket = int(math.log(seconds / _FLOOR_S) / _GROWTH) if seconds > _FLOOR_S else -1
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

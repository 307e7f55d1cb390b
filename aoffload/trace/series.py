"""A count over time in bounded memory: values close together in time are merged."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

__all__ = ["MAX_BUCKETS", "Point", "Series"]

MAX_BUCKETS = 4_096
_FIRST_WIDTH_S = 1e-6


@attrs.frozen
class Point:
    at_s: float
    value: int


@attrs.define
class _Bucket:
    first_s: float
    peak: int
    last_s: float
    last: int


@attrs.define(eq=False)
class Series:
    """Buckets of time, made twice as wide whenever there are too many. Each keeps its highest and its last value."""

    _width_s: float = _FIRST_WIDTH_S
    _buckets: dict[int, _Bucket] = attrs.field(factory=dict)
    _value: int = -1

    def add(self, at_s: float, value: int) -> None:
        """The count is `value` from now on. Times do not go back."""
        if value == self._value:
            return
        self._value = value
        key = int(at_s / self._width_s)
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket.peak, bucket.last_s, bucket.last = max(bucket.peak, value), at_s, value
            return
        self._buckets[key] = _Bucket(at_s, value, at_s, value)
        while len(self._buckets) > MAX_BUCKETS:
            self._widen()

    def points(self) -> Iterator[Point]:
        """In the order of time; each holds until the next one."""
        for bucket in self._buckets.values():
            yield Point(bucket.first_s, bucket.peak)
            if bucket.last != bucket.peak:
                yield Point(bucket.last_s, bucket.last)

    def _widen(self) -> None:
        self._width_s *= 2
        buckets: dict[int, _Bucket] = {}
        for bucket in self._buckets.values():
            key = int(bucket.first_s / self._width_s)
            wider = buckets.get(key)
            if wider is None:
                buckets[key] = bucket
            else:
                wider.peak, wider.last_s, wider.last = max(wider.peak, bucket.peak), bucket.last_s, bucket.last
        self._buckets = buckets

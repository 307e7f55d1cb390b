"""Budgets for writes, because the stores of a cache must not wear out a disk or fill a network that others share."""

from __future__ import annotations

from collections import deque

import attrs

DAY_S = 86_400.0
SLICE_S = 600.0
"""Writes within this number of seconds are counted together, and forgotten together."""
LOW_SHARE = 0.25
"""Share of the budget below which it is low."""


@attrs.define(eq=False)
class Slice:
    begins_s: float
    num_bytes: int = 0


@attrs.define(eq=False)
class DailyBudget:
    """At most `num_bytes` within any `DAY_S` seconds, whenever they begin. `now` is seconds on a monotonic clock.
    Writes of an earlier process do not count."""

    num_bytes: int
    num_written: int = attrs.field(default=0, init=False)
    """Sum of the bytes of `_slices`."""
    _slices: deque[Slice] = attrs.field(factory=deque, init=False)
    """The oldest first."""

    def left(self, now: float) -> int:
        """Bytes that may be written now."""
        while self._slices and self._slices[0].begins_s + SLICE_S + DAY_S <= now:
            self.num_written -= self._slices.popleft().num_bytes
        return max(0, self.num_bytes - self.num_written)

    def is_low(self, now: float) -> bool:
        """Whether less than `LOW_SHARE` of the budget is left. Then write only blocks that were requested twice."""
        return self.left(now) < self.num_bytes * LOW_SHARE

    def spend(self, num_bytes: int, now: float) -> None:
        """Count `num_bytes` bytes that are about to be written."""
        if not self._slices or now >= self._slices[-1].begins_s + SLICE_S:
            self._slices.append(Slice(now))
        self._slices[-1].num_bytes += num_bytes
        self.num_written += num_bytes


@attrs.define(eq=False)
class WriteRate:
    """A budget that gains `bytes_per_s` per second, up to the bytes of one second, or `least_bytes` if that is more.
    `now` is seconds on a monotonic clock."""

    bytes_per_s: int
    least_bytes: int
    """The size of the smallest write. It may exceed the budget, which is then in debt."""
    _left: float = attrs.field(init=False)
    _seen_s: float | None = attrs.field(default=None, init=False)
    _spent: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._left = self._most

    @property
    def _most(self) -> float:
        return float(max(self.bytes_per_s, self.least_bytes))

    def left(self, now: float) -> int:
        """Bytes that may be written now; 0 while the budget is in debt."""
        if self._seen_s is not None:
            self._left = min(self._most, self._left + (now - self._seen_s) * self.bytes_per_s)
        self._seen_s = now
        return max(0, int(self._left))

    def spend_up_to(self, num_bytes: int, now: float) -> None:
        """Count `num_bytes` bytes in total as written or under way. The number may fall if a write did not happen."""
        self.left(now)
        self._left -= num_bytes - self._spent
        self._spent = num_bytes

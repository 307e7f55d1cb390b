"""A rate for writes: stores of a cache must not fill a network or a device that others share."""

from __future__ import annotations

import attrs

__all__ = ["WriteRate"]


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
        """`num_bytes` bytes in total were written or are under way. Less than before, if a write did not happen."""
        self.left(now)
        self._left -= num_bytes - self._spent
        self._spent = num_bytes

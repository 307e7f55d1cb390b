"""How much may be written a second: what others share must not be what a cache fills with its stores."""

from __future__ import annotations

import attrs

__all__ = ["WriteRate"]


@attrs.define(eq=False)
class WriteRate:
    """`bytes_per_s` bytes a second, of which those of one second may be spent at once, and `least_bytes` at any rate.
    `now` is seconds on a clock that does not go back."""

    bytes_per_s: int
    least_bytes: int
    """Of the smallest thing that is written: it goes into debt."""
    _left: float = attrs.field(init=False)
    _seen_s: float | None = attrs.field(default=None, init=False)
    _spent: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._left = self._most

    @property
    def _most(self) -> float:
        return float(max(self.bytes_per_s, self.least_bytes))

    def left(self, now: float) -> int:
        """Bytes that may be written now; 0 while there are debts."""
        if self._seen_s is not None:
            self._left = min(self._most, self._left + (now - self._seen_s) * self.bytes_per_s)
        self._seen_s = now
        return max(0, int(self._left))

    def spend_up_to(self, num_bytes: int, now: float) -> None:
        """So many bytes in all were written or are going to be: fewer than before where some were not written."""
        self.left(now)
        self._left -= num_bytes - self._spent
        self._spent = num_bytes

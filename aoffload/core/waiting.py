"""The line for room: who waits for device blocks, in which order. One pump serves it.

Rules (design, section 6, points 9 and 10): all or nothing; `extend` goes before `allocate`; only the head of the
allocations keeps pins while it waits; the grant is in the waiter before anybody is woken.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable

import attrs

from ..errors import OutOfBlocks, WrongState
from .holding import Holding

__all__ = ["Line", "Waiter", "nobody", "require_idle"]


def nobody() -> None:
    """A synchronous engine looks at `granted` and `error` itself."""


@attrs.define(eq=False, repr=False)
class Waiter:
    """One wait for room of one holding. Exactly one of `granted` and `error` is set when it is over."""

    holding: Holding
    num_units: int
    """Units in all: of the whole table."""
    wake: Callable[[], object] = nobody
    granted: array[int] | None = None
    error: OutOfBlocks | None = None

    def __repr__(self) -> str:
        over = "granted" if self.granted is not None else "failed" if self.error else "waiting"
        return f"<Waiter {self.holding.request_id!r} {self.num_units} units {over}>"

    @property
    def is_over(self) -> bool:
        return self.granted is not None or self.error is not None

    def grant(self, blocks: array[int]) -> None:
        self.granted = blocks
        self.wake()

    def fail(self, error: OutOfBlocks) -> None:
        self.error = error
        self.wake()


@attrs.define(eq=False)
class Line:
    """Those who wait: extensions in the order they came, allocations by ticket."""

    extending: list[Waiter] = attrs.field(factory=list)
    allocating: list[Waiter] = attrs.field(factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.extending and not self.allocating

    def join_extending(self, waiter: Waiter) -> None:
        self.extending.append(waiter)

    def join_allocating(self, waiter: Waiter) -> None:
        """Queue by ticket: who had to let go of everything gets its old place back."""
        insort(self.allocating, waiter, key=_ticket)

    def leave(self, waiter: Waiter) -> None:
        at = bisect_left(self.allocating, _ticket(waiter), key=_ticket)
        if at < len(self.allocating) and self.allocating[at] is waiter:
            del self.allocating[at]
        elif waiter in self.extending:
            self.extending.remove(waiter)


def _ticket(waiter: Waiter) -> int:
    return waiter.holding.ticket


def require_idle(holding: Holding, call: str) -> None:
    """Refuse `call` while `holding` waits for room."""
    if holding.waiter is not None:
        raise WrongState(f"{call}: {holding} is waiting for room already")

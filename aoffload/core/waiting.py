"""The line for room: the waiters for device blocks, in order. `Admission` serves it.

Rules: all or nothing; `extend` goes before `allocate`; only the head of the allocations keeps pins while it waits; the
grant is in the waiter before any `wake` is called.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from ..errors import WrongState
from .owners import Holding, Waiter

__all__ = ["Line", "is_waiting"]


@dataclass(slots=True, eq=False)
class Line:
    """The waiters: extensions in order of arrival, allocations by ticket."""

    extending: list[Waiter] = field(default_factory=list)
    allocating: list[Waiter] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.extending and not self.allocating

    def join_extending(self, waiter: Waiter) -> None:
        self.extending.append(waiter)

    def join_allocating(self, waiter: Waiter) -> None:
        """Queue by ticket: a REQUEUED request gets its old place back."""
        insort(self.allocating, waiter, key=_ticket)

    def leave(self, waiter: Waiter) -> None:
        at = bisect_left(self.allocating, _ticket(waiter), key=_ticket)
        if at < len(self.allocating) and self.allocating[at] is waiter:
            del self.allocating[at]
        elif waiter in self.extending:
            self.extending.remove(waiter)


def _ticket(waiter: Waiter) -> int:
    return waiter.holding.ticket


def is_waiting(holding: Holding, call: str) -> WrongState:
    """The refusal of `call` while `holding` waits for room."""
    return WrongState(f"{call}: {holding} is waiting for room already")

"""Several observers on one ledger, such as a log and metrics. Each receives the same events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from typing import Any

from .._common.arguments import check_has, shown
from .._kernel.events import CompletionDelivered, Event, Observer
from .._kernel.plans import Completion
from ..errors import InvalidArgument
from .log import LedgerLog


class Observers:
    """Several observers as one, for `Ledger(observer=...)`: a log, metrics, observers of your own.

    An exception of one observer is counted and dropped, and the others receive the event all the same.
    `InvalidArgument` for an object without `observe`, or if that is async.
    """

    def __init__(self, *observers: Observer) -> None:
        for observer in observers:
            check_has("observers", observer, "Observer", "observe")
            if iscoroutinefunction(observer.observe):
                raise InvalidArgument(
                    "observers", f"{shown(observer)} has an async `observe`, but observers are called without await"
                )
        self.observers = observers
        self.num_failures = 0
        """Calls that raised."""

    def __repr__(self) -> str:
        return f"<Observers {', '.join(type(observer).__name__ for observer in self.observers)}>"

    def wants_move(self, kind: type[Event], state: Any) -> bool:
        """Whether one of the observers wants the event of a move to `state`. See `Observer`."""
        for observer in self.observers:
            wants_move = getattr(observer, "wants_move", None)
            try:
                if wants_move is None or wants_move(kind, state):
                    return True
            except BaseException:  # noqa: BLE001 - counted, as in `observe`
                self.num_failures += 1
                return True
        return False

    def observe(self, event: Event) -> None:
        for observer in self.observers:
            try:
                observer.observe(event)
            except BaseException:  # noqa: BLE001 - counted; the caller of the ledger has to get its answer
                self.num_failures += 1

    def hearing(self, deliver: Callable[[Completion], None]) -> Callable[[Completion], None]:
        """Wrap `deliver`, which takes a transport's completions, so that each completion is reported first. Logs do not
        need it."""
        if all(isinstance(observer, LedgerLog) for observer in self.observers):
            return deliver

        def hear(completion: Completion) -> None:
            self.observe(CompletionDelivered(completion))
            deliver(completion)

        return hear


def each_observer(observer: Observer | None) -> Iterator[Observer]:
    """`observer`, and the members of each `Observers` in it."""
    if observer is not None:
        yield observer
    if isinstance(observer, Observers):
        for one in observer.observers:
            yield from each_observer(one)

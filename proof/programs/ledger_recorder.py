"""A ledger observer that checks its events, and that calls the ledger and raises at each event."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from aoffload._common.prefix import Prefix, Root
from aoffload._extensions.assembly import AnyLedger
from aoffload._kernel.events import Event
from aoffload.errors import AoffloadError

__all__ = ["Recorder", "Rude"]

PREFIX = Prefix.of(Root("programs", "observers"), [1] * 8)


class Rude(BaseException):
    """The `BaseException` that observers of programs raise, in turn with an `Exception`."""


class Recorder:
    """Checks that every state change begins in the state in which the one before ended. At each event it calls the
    ledger, which has completed its change, and then raises, which must not reach the ledger."""

    __slots__ = ("calls_to", "num_events", "observe", "problem")
    # All but `problem` are functions: the fingerprint of a ledger leaves out their closures.

    def __init__(self) -> None:
        states: dict[int, tuple[Any, Any]] = {}
        raised = itertools.cycle((ValueError, Rude))
        calls: Iterator[Callable[[], object]] = iter(())
        num_events = 0
        self.problem = ""
        """The first violation: an event out of order, or a call that found the ledger in the middle of a change."""

        def observe(event: Event) -> None:
            nonlocal num_events
            num_events += 1
            old, new = getattr(event, "old", None), getattr(event, "new", None)
            if old is not None:
                about: Any = type(event)
                entity: Any = getattr(event, attrs.fields(about)[0].name)
                known = states.get(id(entity))
                if known is not None and known[1] is not old:
                    self.problem = self.problem or f"{entity} moved from {old}, but was told to be {known[1]}"
                states[id(entity)] = entity, new  # keeps the entity, so that its id is not reused
            if (call := next(calls, None)) is not None:
                try:
                    call()
                except AoffloadError as error:
                    self.problem = self.problem or f"told of {event} in the middle of a change: {error}"
            raise next(raised)("an observer")

        def calls_to(ledger: AnyLedger) -> None:
            nonlocal calls
            calls = itertools.cycle(
                (
                    ledger.statistics,
                    ledger.check_integrity,
                    lambda: ledger.lookup(PREFIX),
                    ledger.reports.requests,
                    ledger.reports.holders,
                )
            )

        def how_often() -> int:
            return num_events

        self.observe, self.calls_to, self.num_events = observe, calls_to, how_often

"""A ledger observer that checks its events, and that calls the ledger and raises at each event."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ..._kernel.ledger import Ledger
from ..._kernel.prefix import Prefix, Root
from ..._kernel.protocols import OBSERVES
from ...errors import WrongState

__all__ = ["Recorder", "Rude"]

PREFIX = Prefix.of(Root("programs", "observers"), [1] * 8)


class Rude(BaseException):
    """The `BaseException` that observers of programs raise, in turn with an `Exception`."""


class Recorder:
    """Checks that every state change begins in the state in which the one before ended. At each event it calls the
    ledger, which has to refuse the call, and then raises, which must not reach the ledger."""

    __slots__ = ("_hear", "calls_to", "num_told", "problem")
    # All but `num_told` and `problem` are functions: the fingerprint of a ledger leaves out their closures.

    def __init__(self) -> None:
        states: dict[int, tuple[Any, Any]] = {}
        raised = itertools.cycle((ValueError, Rude))
        calls: Iterator[Callable[[], object]] = iter(())
        num_told = 0
        self.problem = ""
        """The first violation: an event out of order, or a call that was not refused."""

        def hear(*told: Any) -> None:
            nonlocal num_told
            num_told += 1
            entity, old = told[:2] if len(told) > 1 else (None, None)
            if hasattr(entity, "state") and isinstance(old, type(entity.state)):
                known = states.get(id(entity))
                if known is not None and known[1] is not old:
                    self.problem = self.problem or f"{entity} moved from {old}, but was told to be {known[1]}"
                states[id(entity)] = entity, entity.state  # keeps the entity, so that its id is not reused
            if (call := next(calls, None)) is not None:
                with suppress(WrongState):
                    call()
                    self.problem = self.problem or f"a call in the middle of {entity} was not refused"
            raise next(raised)("an observer")

        def calls_to(ledger: Ledger) -> None:
            nonlocal calls
            held = ledger.live_requests
            calls = itertools.cycle((
                ledger.reset, lambda: ledger.release(next(iter(held.values()))), ledger.drop_pins,
                lambda: ledger.admit(PREFIX), lambda: ledger.lapse(0.0), lambda: ledger.discard(1),
                ledger.plan_write_back, lambda: ledger.pin(PREFIX),
            ))  # fmt: skip

        def how_often() -> int:
            return num_told

        self._hear, self.calls_to, self.num_told = hear, calls_to, how_often

    def __getattr__(self, name: str) -> Any:
        if name in OBSERVES.split():
            return self._hear
        raise AttributeError(name)

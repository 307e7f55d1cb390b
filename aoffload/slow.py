"""What takes too long is said once: a wait for room, and a step."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from .config import OffloadConfig
from .core.kept import Step
from .core.ledger import Ledger
from .core.owners import Waiter
from .core.status import Holder
from .observers import Observers

__all__ = ["SlowWatch"]

MAX_AGE_S = 1.0
"""How old the list of holders may be that an event names: many waits may be long at once."""
ROUNDING_S = 1e-3


@attrs.define(eq=False)
class SlowWatch:
    """Has no timer: waits have an alarm of the copy worker's, whose task looks at steps when it looks at deadlines."""

    ledger: Ledger
    config: OffloadConfig
    observers: Observers
    now: Callable[[], float]
    """The clock of the ledger's ages and of the worker's alarms."""
    _said: set[Waiter] = attrs.field(factory=set)
    """Waiters in line whose wait has been said to be long."""
    _last_step: int = 0
    """Steps up to this one have been said to be long, or are over."""
    _biggest: tuple[Holder, ...] = ()
    _biggest_at: float = -math.inf

    # -- waits for room -------------------------------------------------------------------------------------------

    def left_s(self, waiter: Waiter | None) -> float | None:
        """Seconds until the wait is a long one; None if nothing will be said about it."""
        slow_s = self.config.slow_wait_s
        if slow_s is None or waiter is None or waiter.joined_s is None or waiter in self._said:
            return None
        return max(0.0, waiter.joined_s + slow_s - self.now())

    def look_at_wait(self, waiter: Waiter) -> None:
        """Its time is over, or there is no alarm any more. Either way it is looked at once."""
        self._said = {one for one in self._said if one.holding.waiter is one and not one.is_over} | {waiter}
        waited_s, slow_s = self.now() - (waiter.joined_s or 0.0), self.config.slow_wait_s or math.inf
        if not waiter.is_over and waited_s >= slow_s - ROUNDING_S:
            self.observers.slow_wait(self.ledger.situation.wait_for_room(waiter, [*self._holders()]))

    def _holders(self) -> tuple[Holder, ...]:
        if self.now() >= self._biggest_at + MAX_AGE_S:
            self._biggest, self._biggest_at = self.ledger.holders(), self.now()
        return self._biggest

    # -- steps ----------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """When the next step will have been open for too long."""
        step = self._next_step()
        return math.inf if step is None else self._deadline(step)

    def _next_step(self) -> Step | None:
        return next((step for number, step in self.ledger.steps.items() if number > self._last_step), None)

    def _deadline(self, step: Step) -> float:
        slow_s = self.config.slow_step_s
        return math.inf if slow_s is None else step.begun_s + slow_s

    def look_at_steps(self) -> None:
        """Say which steps have been open for too long by now."""
        now = self.now()
        while (step := self._next_step()) is not None and self._deadline(step) <= now:
            self._last_step = step.step_id
            self.observers.slow_step(self.ledger.situation.step(step))

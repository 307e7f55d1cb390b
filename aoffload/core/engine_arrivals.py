"""Arrivals: loads under way into an engine's blocks, and the requests that were told PENDING because of them.

Two requests do not load the same block. The second one is told PENDING, holds no pins, and asks again: once the first
one has offered, the engine's own prefix cache has the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .owners import Holding
from .records import Job

__all__ = ["Arrival", "Arrivals"]


@dataclass(slots=True, frozen=True)
class Arrival:
    """Units `[start, stop)` on their way into an engine's blocks. Once their request has offered, the engine's own
    prefix cache has them, and other requests hit them there."""

    start: int
    stop: int
    jobs: tuple[Job, ...]


@dataclass(slots=True, eq=False)
class _Question:
    """A request that was told PENDING."""

    since: float
    wake: Callable[[], object]
    bringer: Holding
    """The request whose load it waits for."""


@dataclass(slots=True, eq=False)
class Arrivals:
    clock: Callable[[], float]
    pending_timeout_s: float
    under_way: dict[Holding, Arrival] = field(default_factory=dict)
    """Until the request's first offer, or its end."""
    _questions: dict[Holding, _Question] = field(default_factory=dict)

    def bringer(self, holding: Holding, unit: int, num_tokens: int) -> Holding | None:
        """The request whose load brings `unit` of `holding`, with which its first `num_tokens` end; None if there is
        none, or once `holding` has waited for `pending_timeout_s`."""
        if self.clock() >= self.pending_until(holding):
            return None
        sequence = holding.sequence
        tokens = sequence.first_bytes(unit, num_tokens)
        for other, arrival in self.under_way.items():
            if not arrival.start <= unit < arrival.stop:
                continue
            # Of most, the unit itself tells that they bring another one.
            if other.sequence.first_bytes(unit, num_tokens) == tokens and other.sequence.agrees(sequence, num_tokens):
                return other
        return None

    def pending_until(self, holding: Holding) -> float:
        """When `holding` is told to wait no longer; infinity if it is not waiting."""
        question = self._questions.get(holding)
        return math.inf if question is None else question.since + self.pending_timeout_s

    def waits_for(self, holding: Holding) -> Holding | None:
        """The request whose load `holding` was told to wait for; None if it was told otherwise."""
        question = self._questions.get(holding)
        return None if question is None else question.bringer

    def ask_again(self, holding: Holding, bringer: Holding, wake: Callable[[], object]) -> None:
        """`holding` is told PENDING because of `bringer`. The timeout counts from the first time."""
        before = self._questions.get(holding)
        self._questions[holding] = _Question(self.clock() if before is None else before.since, wake, bringer)

    def answered(self, holding: Holding) -> None:
        self._questions.pop(holding, None)

    def fell_short(self, holding: Holding, stop: int) -> list[Callable[[], object]]:
        """The load of `holding` has only reached unit `stop`. Returns the callbacks to call."""
        arrival = self.under_way[holding]
        if stop == arrival.start:
            del self.under_way[holding]
        else:
            self.under_way[holding] = Arrival(arrival.start, stop, arrival.jobs)
        return self._waiting_for(holding)

    def taken_back(self, holding: Holding, stop: int) -> list[Callable[[], object]]:
        """`holding` has taken back what it has from unit `stop` on. Returns the callbacks to call."""
        arrival = self.under_way.get(holding)
        return [] if arrival is None or arrival.stop <= stop else self.fell_short(holding, max(stop, arrival.start))

    def over(self, holding: Holding) -> list[Callable[[], object]]:
        """`holding` has offered what it loaded, or is over. Returns the callbacks to call."""
        return [] if self.under_way.pop(holding, None) is None else self._waiting_for(holding)

    def _waiting_for(self, holding: Holding) -> list[Callable[[], object]]:
        return [question.wake for question in self._questions.values() if question.bringer is holding]

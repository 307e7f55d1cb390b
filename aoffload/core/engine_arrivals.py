"""Arrivals: which request's load brings what into an engine's blocks, and who was told to ask again because of it.

Two requests do not load the same block. The second one hears PENDING, holds no pins, and asks again: once the first one
has offered, the engine's own prefix cache has the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import attrs

from .owners import Holding
from .records import Job

__all__ = ["Arrival", "Arrivals"]


@attrs.frozen
class Arrival:
    """Units `[start, stop)` on their way into blocks of an engine's. Once its request has offered, the engine's own
    prefix cache has them, and others hit them there."""

    start: int
    stop: int
    jobs: tuple[Job, ...]


@dataclass(slots=True, eq=False)
class _Question:
    """A request that was told to ask again."""

    since: float
    wake: Callable[[], object]
    bringer: Holding
    """Whose load it waits for."""


@dataclass(slots=True, eq=False)
class Arrivals:
    clock: Callable[[], float]
    pending_timeout_s: float
    under_way: dict[Holding, Arrival] = field(default_factory=dict)
    """Until the first offer behind it."""
    _questions: dict[Holding, _Question] = field(default_factory=dict)

    def bringer(self, holding: Holding, unit: int, num_tokens: int) -> Holding | None:
        """Whose load brings `unit` of `holding`, whose first `num_tokens` end with it; none, once it has waited for
        long enough."""
        question = self._questions.get(holding)
        if question is not None and self.clock() - question.since >= self.pending_timeout_s:
            return None
        for other, arrival in self.under_way.items():
            if arrival.start <= unit < arrival.stop and other.sequence.agrees(holding.sequence, num_tokens):
                return other
        return None

    def ask_again(self, holding: Holding, bringer: Holding, wake: Callable[[], object]) -> None:
        """`holding` is told to wait for `bringer`. What counts is when it was told so first."""
        before = self._questions.get(holding)
        self._questions[holding] = _Question(self.clock() if before is None else before.since, wake, bringer)

    def answered(self, holding: Holding) -> None:
        self._questions.pop(holding, None)

    def fell_short(self, holding: Holding, stop: int) -> list[Callable[[], object]]:
        """Its load has brought no more than up to unit `stop`. Whom to wake."""
        arrival = self.under_way[holding]
        if stop == arrival.start:
            del self.under_way[holding]
        else:
            self.under_way[holding] = attrs.evolve(arrival, stop=stop)
        return self._waiting_for(holding)

    def over(self, holding: Holding) -> list[Callable[[], object]]:
        """The engine has what `holding` has loaded, or will never have it. Whom to wake."""
        return [] if self.under_way.pop(holding, None) is None else self._waiting_for(holding)

    def _waiting_for(self, holding: Holding) -> list[Callable[[], object]]:
        return [question.wake for question in self._questions.values() if question.bringer is holding]

"""Who is told of every move of a state, and the one place from which states are moved."""

from __future__ import annotations

from typing import Protocol

import attrs

from .lifecycle import (
    JOB_MOVES,
    REQUEST_MOVES,
    EarlyState,
    ErrandState,
    JobState,
    PinState,
    RequestState,
    illegal,
    move,
)
from .owners import EarlyStart, Errand, Holding, Pin
from .records import Job

__all__ = ["Moves", "NullObserver", "Observer"]


class Observer(Protocol):
    """Who wants to know of every move: the telemetry. Called after the change; must not call back."""

    def request_moved(self, holding: Holding, old: RequestState, reason: str) -> None: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> None: ...
    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None:
        """`holding` is None for what would have been stored because it is about to be evicted."""

    def pin_moved(self, pin: Pin, old: PinState) -> None: ...
    def errand_moved(self, errand: Errand, old: ErrandState) -> None: ...
    def early_moved(self, early: EarlyStart, old: EarlyState) -> None: ...


class NullObserver:
    """Does nothing with what it is told: a base for who wants to know of some moves only."""

    def request_moved(self, holding: Holding, old: RequestState, reason: str) -> None: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> None: ...
    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None: ...
    def pin_moved(self, pin: Pin, old: PinState) -> None: ...
    def errand_moved(self, errand: Errand, old: ErrandState) -> None: ...
    def early_moved(self, early: EarlyStart, old: EarlyState) -> None: ...


@attrs.frozen
class Moves:
    """Moves states, and tells whoever wants to know. Requests and jobs move often, so it looks into their tables
    itself."""

    observer: Observer | None

    def request(self, holding: Holding, state: RequestState) -> None:
        old = holding.state
        if state not in REQUEST_MOVES[old]:
            raise illegal(holding, state)
        holding.state = state
        if self.observer is not None:
            self.observer.request_moved(holding, old, holding.reason)

    def job(self, job: Job, state: JobState, reason: str = "") -> None:
        old = job.state
        if state not in JOB_MOVES[old]:
            raise illegal(job, state)
        job.state = state
        if self.observer is not None:
            self.observer.job_moved(job, old, reason)

    def pin(self, pin: Pin, state: PinState) -> None:
        old = move(pin, state)
        if self.observer is not None:
            self.observer.pin_moved(pin, old)  # type: ignore[arg-type]

    def errand(self, errand: Errand, state: ErrandState) -> None:
        old = move(errand, state)
        if self.observer is not None:
            self.observer.errand_moved(errand, old)  # type: ignore[arg-type]

    def early(self, early: EarlyStart, state: EarlyState) -> None:
        old = move(early, state)
        if self.observer is not None:
            self.observer.early_moved(early, old)  # type: ignore[arg-type]

    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None:
        """Nothing moves: blocks that were to be stored are not."""
        if self.observer is not None:
            self.observer.store_skipped(holding, num_blocks, reason)

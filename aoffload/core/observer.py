"""Who is told of every move of a state, and the one place from which states are moved."""

from __future__ import annotations

from typing import Protocol

import attrs

from .lifecycle import EarlyState, ErrandState, JobState, PinState, RequestState, move
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
    """Nobody wants to know."""

    def request_moved(self, holding: Holding, old: RequestState, reason: str) -> None: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> None: ...
    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None: ...
    def pin_moved(self, pin: Pin, old: PinState) -> None: ...
    def errand_moved(self, errand: Errand, old: ErrandState) -> None: ...
    def early_moved(self, early: EarlyStart, old: EarlyState) -> None: ...


@attrs.frozen
class Moves:
    """Moves states, and tells whoever wants to know."""

    observer: Observer

    def request(self, holding: Holding, state: RequestState) -> None:
        old = move(holding, state)
        self.observer.request_moved(holding, old, holding.reason)  # type: ignore[arg-type]

    def job(self, job: Job, state: JobState, reason: str = "") -> None:
        old = move(job, state)
        self.observer.job_moved(job, old, reason)  # type: ignore[arg-type]

    def pin(self, pin: Pin, state: PinState) -> None:
        self.observer.pin_moved(pin, move(pin, state))  # type: ignore[arg-type]

    def errand(self, errand: Errand, state: ErrandState) -> None:
        self.observer.errand_moved(errand, move(errand, state))  # type: ignore[arg-type]

    def early(self, early: EarlyStart, state: EarlyState) -> None:
        self.observer.early_moved(early, move(early, state))  # type: ignore[arg-type]

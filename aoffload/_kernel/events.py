"""`Moves`, the only place that moves states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import IllegalTransition
from .protocols import OBSERVES, NullObserver, Observer, shielded
from .records import Job
from .requests import CacheTransfer, LedgerRequest, LoadOverlap, Pin, Step
from .states import (
    CACHE_TRANSFER_MOVES,
    JOB_MOVES,
    OVERLAP_MOVES,
    PIN_MOVES,
    REQUEST_MOVES,
    CacheTransferState,
    JobState,
    OverlapState,
    PinState,
    RequestState,
    State,
    Stateful,
)

__all__ = ["Moves"]


@dataclass(slots=True, eq=False)
class Moves:
    """Moves states as their tables allow, and reports each move to the observer. Exceptions of the observer are
    dropped. An illegal move raises and changes nothing."""

    observer: Observer | None
    clock: Callable[[], float] | None = None
    """Ages of states count by it; None: nobody asks for them."""
    is_telling: bool = field(default=False, init=False)
    """Whether a report is under way, in the middle of a change. The ledger then refuses the observer's calls."""
    told: Observer = field(init=False)
    """The observer, with its exceptions dropped; without an observer, one that does nothing."""

    def __post_init__(self) -> None:
        self.told = NullObserver() if self.observer is None else shielded(self.observer, OBSERVES, self)

    def request(self, request: LedgerRequest, state: RequestState) -> None:
        old = request.state
        if state not in REQUEST_MOVES[old]:
            raise _illegal(request, state)
        if self.clock is not None:
            request.since_s = self.clock()
        request.state = state
        if self.observer is not None:
            self.told.request_moved(request, old, request.reason)

    def job(self, job: Job, state: JobState, reason: str = "") -> None:
        old = job.state
        if state not in JOB_MOVES[old]:
            raise _illegal(job, state)
        if self.clock is not None:
            job.since_s = self.clock()
        job.state = state
        if self.observer is not None:
            self.told.job_moved(job, old, reason)

    def pin(self, pin: Pin, state: PinState) -> None:
        old = pin.state
        if state not in PIN_MOVES[old]:
            raise _illegal(pin, state)
        if self.clock is not None:
            pin.since_s = self.clock()
        pin.state = state
        if self.observer is not None:
            self.told.pin_moved(pin, old)

    def cache_transfer(self, transfer: CacheTransfer, state: CacheTransferState) -> None:
        old = transfer.state
        if state not in CACHE_TRANSFER_MOVES[old]:
            raise _illegal(transfer, state)
        transfer.state = state
        if self.observer is not None:
            self.told.cache_transfer_moved(transfer, old)

    def overlap(self, overlap: LoadOverlap, state: OverlapState) -> None:
        old = overlap.state
        if state not in OVERLAP_MOVES[old]:
            raise _illegal(overlap, state)
        overlap.state = state
        if self.observer is not None:
            self.told.overlap_moved(overlap, old)

    def step_begun(self, step: Step) -> None:
        if self.clock is not None:
            step.begun_s = self.clock()
        if self.observer is not None:
            self.told.step_begun(step)

    def step_ended(self, step: Step) -> None:
        if self.observer is not None:
            self.told.step_ended(step)


def _illegal(entity: Stateful, new: State) -> IllegalTransition:
    return IllegalTransition(str(entity), entity.state.name, new.name)

"""`Moves`, the only place that moves states, and the queue of events that are not reported yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ..errors import IllegalTransition
from .events import (
    CacheTransferMoved,
    Event,
    JobMoved,
    Observer,
    OverlapMoved,
    PinMoved,
    RequestMoved,
    StepBegun,
    StepEnded,
)
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


@dataclass(slots=True, eq=False)
class Moves:
    """Moves states as their tables allow, and notes each move for the observer. An illegal move raises and changes
    nothing."""

    observer: Observer | None
    clock: Callable[[], float] | None = None
    """Ages of states count by it. None: they are not measured."""
    untold: deque[Event] = field(default_factory=deque, init=False)
    """Events that are not reported yet. Each call of the ledger reports them when its change is complete."""
    _is_telling: bool = field(default=False, init=False)

    def request(self, request: LedgerRequest, state: RequestState) -> None:
        old = request.state
        if state not in REQUEST_MOVES[old]:
            raise _illegal(request, state)
        if self.clock is not None:
            request.since_s = self.clock()
        request.state = state
        if self.observer is not None:
            num_blocks = request.num_blocks if state is RequestState.ALLOCATED else 0
            computed, lost = request.num_computed_tokens, request.num_lost_tokens
            moved = RequestMoved(request, old, state, request.reason, request.match, num_blocks, computed, lost)
            self.untold.append(moved)

    def job(self, job: Job, state: JobState, reason: str = "") -> None:
        old = job.state
        if state not in JOB_MOVES[old]:
            raise _illegal(job, state)
        if self.clock is not None:
            job.since_s = self.clock()
        job.state = state
        if self.observer is not None:
            self.untold.append(JobMoved(job, old, state, reason))

    def pin(self, pin: Pin, state: PinState) -> None:
        old = pin.state
        if state not in PIN_MOVES[old]:
            raise _illegal(pin, state)
        if self.clock is not None:
            pin.since_s = self.clock()
        pin.state = state
        self.note(PinMoved(pin, old, state))

    def cache_transfer(self, transfer: CacheTransfer, state: CacheTransferState) -> None:
        old = transfer.state
        if state not in CACHE_TRANSFER_MOVES[old]:
            raise _illegal(transfer, state)
        transfer.state = state
        self.note(CacheTransferMoved(transfer, old, state))

    def overlap(self, overlap: LoadOverlap, state: OverlapState) -> None:
        old = overlap.state
        if state not in OVERLAP_MOVES[old]:
            raise _illegal(overlap, state)
        overlap.state = state
        self.note(OverlapMoved(overlap, old, state))

    def step_begun(self, step: Step) -> None:
        if self.clock is not None:
            step.begun_s = self.clock()
        if self.observer is not None:
            num_blocks = 0
            for request in step.requests:
                num_blocks += request.num_blocks
            self.untold.append(StepBegun(step, num_blocks))

    def step_ended(self, step: Step) -> None:
        if self.observer is not None:
            over = tuple([request.request_id for request in step.requests if request.is_over])
            self.untold.append(StepEnded(step, over))

    def note(self, event: Event) -> None:
        """Note an event for the observer, if there is one."""
        if self.observer is not None:
            self.untold.append(event)

    def tell(self) -> None:
        """Report the events so far, in order. The last thing in every call of the ledger but waking.

        An observer may call the ledger: the events of such a call are reported after those that came before it."""
        if self._is_telling or self.observer is None:
            return
        self._is_telling = True
        untold, observe = self.untold, self.observer.observe
        while untold:
            with suppress(BaseException):  # the caller of the ledger has to get its answer; `Observers` counts
                observe(untold.popleft())
        self._is_telling = False


def _illegal(entity: Stateful, new: State) -> IllegalTransition:
    return IllegalTransition(str(entity), entity.state.name, new.name)

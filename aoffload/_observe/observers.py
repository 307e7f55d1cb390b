"""Observers beside the log, such as metrics: they get its events and some that only a runtime sees."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

from .._arguments import check_has
from .._kernel.plans import Completion
from .._kernel.protocols import OBSERVES, NullObserver, Observer
from .._kernel.records import Job
from .._kernel.requests import CacheTransfer, LedgerRequest, LoadOverlap, Pin, Step
from .._kernel.states import CacheTransferState, JobState, OverlapState, PinState, RequestState, Tier
from .._kernel.status import HintEnd, Holder, RequestStatus, TierEviction
from .._transfer.copy_queue import OBSERVES as COPIES_TELL

__all__ = ["Observers", "RuntimeObserver", "each_observer"]


_RENAMED = {"errand_moved": "cache_transfer_moved", "early_moved": "overlap_moved"}
_TOLD = f"{OBSERVES} request_cancelled waited_for_room slow_wait slow_step completion_delivered {COPIES_TELL}".split()


class RuntimeObserver(NullObserver):
    """Base class for observers of a runtime or a ledger. Methods that are not overridden do nothing.

    Except for `completion_delivered`, they are called in the event loop's thread, after the change and in the middle of
    a call. They must neither block nor call the runtime. Their exceptions are counted and dropped, even
    `CancelledError`, `KeyboardInterrupt` and every other `BaseException`, because the runtime has to complete the
    change that it is reporting.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for old, new in _RENAMED.items():
            if old in vars(cls):
                problem = f"{cls.__name__}.{old} is not called any more: it is {new} now"
                warnings.warn(problem, DeprecationWarning, stacklevel=2)

    def request_cancelled(self, record: LedgerRequest, reason: str) -> None:
        """Its block is being cancelled; `request_moved` follows once its task has left it."""

    def waited_for_room(self, record: LedgerRequest, seconds: float) -> None:
        """A wait for room is over, however it ended."""

    def slow_wait(self, status: RequestStatus) -> None:
        """A request has been in line for room for `slow_wait_s`; told once a wait."""

    def slow_step(self, step: Holder) -> None:
        """A step has been open for `slow_step_s`; told once a step."""

    def completion_delivered(self, completion: Completion) -> None:
        """The transport has delivered a completion. Called in that thread, before the event loop settles it."""


class Observers:
    """Several observers as one, for `Ledger(observer=...)`: a log, metrics, observers of your own.

    Each has the methods of `Observer`. Those of `RuntimeObserver`, and what a `CopyQueue` reports, are told to who has
    them. What one raises is counted, and the others are told all the same: the ledger reports in the middle of a
    change. `InvalidArgument` for what is no observer.
    """

    def __init__(self, *observers: Observer) -> None:
        for observer in observers:
            check_has("observers", observer, "Observer", OBSERVES)
        self.observers = observers
        self.num_failures = 0
        """Calls that raised."""
        self._hearers = {call: [getattr(one, call) for one in observers if hasattr(one, call)] for call in _TOLD}

    def __repr__(self) -> str:
        return f"<Observers {', '.join(type(observer).__name__ for observer in self.observers)}>"

    def _tell(self, call: str, *args: object) -> None:
        for hear in self._hearers[call]:
            try:
                hear(*args)
            except BaseException:  # noqa: BLE001 - counted; must not reach the ledger, see `core.observing`
                self.num_failures += 1

    # -- told by the ledger ---------------------------------------------------------------------------------------

    def request_moved(self, record: LedgerRequest, old: RequestState, reason: str) -> None:
        self._tell("request_moved", record, old, reason)

    def job_moved(self, job: Job, old: JobState, reason: str) -> None:
        self._tell("job_moved", job, old, reason)

    def store_skipped(self, record: LedgerRequest | None, num_blocks: int, reason: str) -> None:
        self._tell("store_skipped", record, num_blocks, reason)

    def pin_moved(self, pin: Pin, old: PinState) -> None:
        self._tell("pin_moved", pin, old)

    def cache_transfer_moved(self, transfer: CacheTransfer, old: CacheTransferState) -> None:
        self._tell("cache_transfer_moved", transfer, old)

    def overlap_moved(self, overlap: LoadOverlap, old: OverlapState) -> None:
        self._tell("overlap_moved", overlap, old)

    def loads_paused(self, num_quarantined: int) -> None:
        self._tell("loads_paused", num_quarantined)

    def loads_resumed(self, num_quarantined: int) -> None:
        self._tell("loads_resumed", num_quarantined)

    def step_begun(self, step: Step) -> None:
        self._tell("step_begun", step)

    def step_ended(self, step: Step) -> None:
        self._tell("step_ended", step)

    def extension_refused(self, record: LedgerRequest, num_needed: int, num_available: int) -> None:
        self._tell("extension_refused", record, num_needed, num_available)

    def eviction_switched(self, tier: TierEviction) -> None:
        self._tell("eviction_switched", tier)

    def hint_given(self, hint_id: int, category: str, num_tokens: int) -> None:
        self._tell("hint_given", hint_id, category, num_tokens)

    def hint_ended(self, hint_id: int, category: str, end: HintEnd) -> None:
        self._tell("hint_ended", hint_id, category, end)

    # -- told by what waits and what copies -----------------------------------------------------------------------

    def request_cancelled(self, record: LedgerRequest, reason: str) -> None:
        self._tell("request_cancelled", record, reason)

    def waited_for_room(self, record: LedgerRequest, seconds: float) -> None:
        self._tell("waited_for_room", record, seconds)

    def slow_wait(self, status: RequestStatus) -> None:
        self._tell("slow_wait", status)

    def slow_step(self, step: Holder) -> None:
        self._tell("slow_step", step)

    def completion_delivered(self, completion: Completion) -> None:
        """Called in the transport's thread."""
        self._tell("completion_delivered", completion)

    def hearing(self, deliver: Callable[[Completion], None]) -> Callable[[Completion], None]:
        """A wrapper of `deliver`, which takes a transport's completions, that first tells the observers of each."""
        if not self._hearers["completion_delivered"]:
            return deliver

        def hear(completion: Completion) -> None:
            self.completion_delivered(completion)
            deliver(completion)

        return hear

    def transport_stalled(self, source: Tier, destination: Tier, num_jobs: int) -> None:
        self._tell("transport_stalled", source, destination, num_jobs)

    def transport_recovered(self, source: Tier, destination: Tier) -> None:
        self._tell("transport_recovered", source, destination)

    def worker_failed(self, error: BaseException) -> None:
        self._tell("worker_failed", error)

    def cache_turned_off(self, reason: str) -> None:
        self._tell("cache_turned_off", reason)


def each_observer(observer: Observer | None) -> Iterator[Observer]:
    """`observer`, and those that it stands for."""
    if observer is not None:
        yield observer
    if isinstance(observer, Observers):
        for one in observer.observers:
            yield from each_observer(one)

"""Observers beside the telemetry, such as metrics: they get its events and some that only the runtime sees."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import attrs

from .arguments import shown
from .core.kept import CacheTransfer, Pin
from .core.lifecycle import CacheTransferState, JobState, OverlapState, PinState, RequestState
from .core.observer import NullObserver
from .core.owners import Holding, LoadOverlap
from .core.plan import Completion
from .core.records import Job
from .errors import InvalidArgument
from .telemetry import Telemetry

__all__ = ["Observers", "RuntimeObserver"]

_RENAMED = {"errand_moved": "cache_transfer_moved", "early_moved": "overlap_moved"}


class RuntimeObserver(NullObserver):
    """Base class for observers of a runtime. Methods that are not overridden do nothing.

    Except for `completion_delivered`, they are called in the event loop's thread, after the change and in the middle of
    a call. They must neither block nor call the runtime. Exceptions are counted and dropped.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for old, new in _RENAMED.items():
            if old in vars(cls):
                problem = f"{cls.__name__}.{old} is not called any more: it is {new} now"
                warnings.warn(problem, DeprecationWarning, stacklevel=2)

    def waited_for_room(self, holding: Holding, seconds: float) -> None:
        """A wait for room is over, however it ended."""

    def completion_delivered(self, completion: Completion) -> None:
        """The transport has delivered a completion. Called in that thread, before the event loop settles it."""


@attrs.define(eq=False)
class Observers:
    """The telemetry and the other observers as one. Without others, the ledger reports to the telemetry directly."""

    telemetry: Telemetry
    others: tuple[RuntimeObserver, ...] = ()
    num_failures: int = 0
    """Calls that raised. Exceptions are swallowed, since the ledger reports in the middle of a change."""

    def __attrs_post_init__(self) -> None:
        for observer in self.others:
            if not isinstance(observer, RuntimeObserver):
                raise InvalidArgument("observers", f"must be RuntimeObserver objects, got {shown(observer)}")

    def _tell(self, call: Callable[[RuntimeObserver], None]) -> None:
        for observer in self.others:
            try:
                call(observer)
            except Exception:  # noqa: BLE001 - counted; must not reach the ledger
                self.num_failures += 1

    def request_moved(self, holding: Holding, old: RequestState, reason: str) -> None:
        self.telemetry.request_moved(holding, old, reason)
        self._tell(lambda observer: observer.request_moved(holding, old, reason))

    def job_moved(self, job: Job, old: JobState, reason: str) -> None:
        self.telemetry.job_moved(job, old, reason)
        self._tell(lambda observer: observer.job_moved(job, old, reason))

    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None:
        self.telemetry.store_skipped(holding, num_blocks, reason)
        self._tell(lambda observer: observer.store_skipped(holding, num_blocks, reason))

    def pin_moved(self, pin: Pin, old: PinState) -> None:
        self.telemetry.pin_moved(pin, old)
        self._tell(lambda observer: observer.pin_moved(pin, old))

    def cache_transfer_moved(self, transfer: CacheTransfer, old: CacheTransferState) -> None:
        self.telemetry.cache_transfer_moved(transfer, old)
        self._tell(lambda observer: observer.cache_transfer_moved(transfer, old))

    def overlap_moved(self, overlap: LoadOverlap, old: OverlapState) -> None:
        self.telemetry.overlap_moved(overlap, old)
        self._tell(lambda observer: observer.overlap_moved(overlap, old))

    def loads_paused(self, num_quarantined: int) -> None:
        self.telemetry.loads_paused(num_quarantined)
        self._tell(lambda observer: observer.loads_paused(num_quarantined))

    def loads_resumed(self, num_quarantined: int) -> None:
        self.telemetry.loads_resumed(num_quarantined)
        self._tell(lambda observer: observer.loads_resumed(num_quarantined))

    def waited_for_room(self, holding: Holding, seconds: float) -> None:
        self._tell(lambda observer: observer.waited_for_room(holding, seconds))

    def hearing(self, deliver: Callable[[Completion], None]) -> Callable[[Completion], None]:
        """A wrapper of `deliver` that first tells the other observers of each completion."""
        if not self.others:
            return deliver

        def hear(completion: Completion) -> None:
            self._tell(lambda observer: observer.completion_delivered(completion))
            deliver(completion)

        return hear

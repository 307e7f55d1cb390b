"""Who else is told of what the telemetry is told, and of what only the shell sees: the metrics, say."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from .arguments import shown
from .core.kept import Errand, Pin
from .core.lifecycle import EarlyState, ErrandState, JobState, PinState, RequestState
from .core.observer import NullObserver
from .core.owners import EarlyStart, Holding
from .core.plan import Completion
from .core.records import Job
from .errors import InvalidArgument
from .telemetry import Telemetry

__all__ = ["Observers", "RuntimeObserver"]


class RuntimeObserver(NullObserver):
    """A base for observers of a runtime: what is not overridden does nothing.

    Called in the event loop's thread, after the change and in the middle of a call: it must neither block nor call the
    runtime. What it raises is counted and goes no further.
    """

    def waited_for_room(self, holding: Holding, seconds: float) -> None:
        """A wait for room is over, however it ended."""

    def completion_delivered(self, completion: Completion) -> None:
        """The transport has reported, in whatever thread: this is called there. The loop hears of it later."""


@attrs.define(eq=False)
class Observers:
    """The telemetry and the others as one observer. Where there are no others, nothing goes through here."""

    telemetry: Telemetry
    others: tuple[RuntimeObserver, ...] = ()
    num_failures: int = 0
    """Calls that one of the others raised at. The ledger is in the middle of a change when it reports."""

    def __attrs_post_init__(self) -> None:
        for observer in self.others:
            if not isinstance(observer, RuntimeObserver):
                raise InvalidArgument("observers", f"must be RuntimeObserver objects, got {shown(observer)}")

    def _tell(self, call: Callable[[RuntimeObserver], None]) -> None:
        for observer in self.others:
            try:
                call(observer)
            except Exception:  # noqa: BLE001 - there is nobody left to tell
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

    def errand_moved(self, errand: Errand, old: ErrandState) -> None:
        self.telemetry.errand_moved(errand, old)
        self._tell(lambda observer: observer.errand_moved(errand, old))

    def early_moved(self, early: EarlyStart, old: EarlyState) -> None:
        self.telemetry.early_moved(early, old)
        self._tell(lambda observer: observer.early_moved(early, old))

    def waited_for_room(self, holding: Holding, seconds: float) -> None:
        self._tell(lambda observer: observer.waited_for_room(holding, seconds))

    def hearing(self, deliver: Callable[[Completion], None]) -> Callable[[Completion], None]:
        """`deliver`, of whose calls the others are told first."""
        if not self.others:
            return deliver

        def hear(completion: Completion) -> None:
            self._tell(lambda observer: observer.completion_delivered(completion))
            deliver(completion)

        return hear

"""Observers of state moves. An observer may be of any class. This file is never compiled, so that observers can derive
from its classes.

A ledger reports in the middle of a change, and it has to complete the change whatever an observer does. So the ledger
drops every exception of an observer, even a `BaseException`. Such an exception never is a cancellation of the task that
makes the change, because a task is cancelled only where it waits, and a report never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from .kept import CacheTransfer, Pin, Step
from .lifecycle import CacheTransferState, JobState, OverlapState, PinState, RequestState
from .owners import Holding, LoadOverlap
from .records import Job
from .status import HintEnd, TierEviction

__all__ = ["OBSERVES", "NullObserver", "Observer", "shielded"]

OBSERVES = (
    "request_moved job_moved store_skipped pin_moved cache_transfer_moved overlap_moved loads_paused loads_resumed "
    "step_begun step_ended extension_refused eviction_switched hint_given hint_ended"
)
"""The methods of an `Observer`."""


class Observer(Protocol):
    """Called after every state move. It must not call the ledger. Its exceptions are dropped. The telemetry is an
    observer."""

    def request_moved(self, holding: Holding, old: RequestState, reason: str) -> object: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> object: ...
    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> object:
        """`holding` is None for a write-back."""

    def pin_moved(self, pin: Pin, old: PinState) -> object: ...
    def cache_transfer_moved(self, transfer: CacheTransfer, old: CacheTransferState) -> object: ...
    def overlap_moved(self, overlap: LoadOverlap, old: OverlapState) -> object: ...
    def loads_paused(self, num_quarantined: int) -> object:
        """With `engine_blocks`: so many blocks are in quarantine that nothing is loaded any more."""

    def loads_resumed(self, num_quarantined: int) -> object:
        """Copies were proven over, and loading goes on."""

    def step_begun(self, step: Step) -> object: ...
    def step_ended(self, step: Step) -> object:
        """Blocks that only this step held are free. Of requests that are over, it held the last ones."""

    def extension_refused(self, holding: Holding, num_needed: int, num_available: int) -> object:
        """`extend_nowait` has raised `OutOfBlocks`; nothing has changed. `extend` waits in line then."""

    def eviction_switched(self, tier: TierEviction) -> object:
        """Where eviction learns: from what was learned to the last use, or back. `tier.rule` rules from now on."""

    def hint_given(self, hint_id: int, category: str, num_tokens: int) -> object:
        """It spares so many tokens; 0 also where too few hints of its category come true."""

    def hint_ended(self, hint_id: int, category: str, end: HintEnd) -> object: ...


class NullObserver:
    """Does nothing: a base for observers of some moves only."""

    def request_moved(self, holding: Holding, old: RequestState, reason: str) -> None: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> None: ...
    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None: ...
    def pin_moved(self, pin: Pin, old: PinState) -> None: ...
    def cache_transfer_moved(self, transfer: CacheTransfer, old: CacheTransferState) -> None: ...
    def overlap_moved(self, overlap: LoadOverlap, old: OverlapState) -> None: ...
    def loads_paused(self, num_quarantined: int) -> None: ...
    def loads_resumed(self, num_quarantined: int) -> None: ...
    def step_begun(self, step: Step) -> None: ...
    def step_ended(self, step: Step) -> None: ...
    def extension_refused(self, holding: Holding, num_needed: int, num_available: int) -> None: ...
    def eviction_switched(self, tier: TierEviction) -> None: ...
    def hint_given(self, hint_id: int, category: str, num_tokens: int) -> None: ...
    def hint_ended(self, hint_id: int, category: str, end: HintEnd) -> None: ...


class Teller(Protocol):
    is_telling: bool


def shielded(one: Any, calls: str, teller: Teller | None = None) -> Any:
    """`one`, an observer or a watcher, in a wrapper that drops all exceptions of its `calls`. While a call is under
    way, `teller.is_telling` is true."""
    return _Shield(one, calls.split(), _Anybody() if teller is None else teller)


class _Anybody:
    is_telling = False


class _Shield:
    def __init__(self, one: Any, calls: list[str], teller: Teller) -> None:
        for call in calls:
            setattr(self, call, partial(_tell, teller, getattr(one, call)))


def _tell(teller: Teller, hear: Callable[..., object], *args: object) -> None:
    teller.is_telling = True
    try:
        hear(*args)
    except BaseException:  # noqa: BLE001 - the change that is reported has to be completed
        pass
    finally:
        teller.is_telling = False

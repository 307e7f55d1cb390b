"""Events: what a ledger, a copy queue and a runtime report to their observers.

An observer has one method, `observe(event)`. Each kind of event is a class, so an observer tells them apart by class:

    def observe(self, event: Event) -> None:
        match event:
            case RequestMoved(new=RequestState.DONE):
                ...
            case StoreSkipped():
                ...

A ledger reports after the change. It notes events while a call changes it, and reports them, in order, when the call
has completed the change and the wait queue is served. So an observer may call the ledger: nothing is half done. Because
a record may have changed since the event, an event also has the values of its fields at that time.

What an observer raises is counted and dropped, even a `BaseException`, because the caller of the ledger has to get its
answer: without it, the planned jobs would never be launched, and would hold their blocks for ever. Such an exception is
never a cancellation of the task that makes the call, because a task is cancelled only where it waits, and a report
never waits.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from .._common.tiers import Tier
from .plans import Completion, PrefixMatch
from .records import Job, LedgerRequest, Step
from .states import JobState, RequestState


class Event:
    """Base class of all events."""

    __slots__ = ()


class Observer(Protocol):
    """Receives events in the thread of the ledger, except for `CompletionDelivered`. It must not block.

    A ledger reports after each change, so `observe` may call the ledger and the `CopyQueue`. The events of such a call
    come after those of the call that is being reported. An observer that answers the events of its own calls never
    ends. The ledger drops any exception of an observer, even a `BaseException`.

    An observer may have a method `wants_move(kind, state)`. The ledger calls it at each move of a request or a job,
    with the class of the event (`RequestMoved` or `JobMoved`) and the new state. If it returns False, the ledger makes
    no event. If it raises, the ledger makes the event. It must not call the ledger, because the change is not complete
    yet. An observer without the method gets all events. Several observers (`Observers`) all get the moves that one of
    them wants."""

    def observe(self, event: Event, /) -> object:
        """Called with each event."""
        ...


# -- of a ledger -------------------------------------------------------------------------------------------------------


@attrs.frozen
class RequestMoved(Event):
    """A request has entered another state."""

    request: LedgerRequest
    old: RequestState
    new: RequestState
    reason: str
    """Why the request was aborted. Empty for every other move."""
    match: PrefixMatch
    num_blocks: int
    """Positions in the request's block tables after a move to ALLOCATED, null blocks included; 0 after any other
    move."""
    num_computed_tokens: int
    num_lost_tokens: int
    """Tokens that the loads of the request have failed to bring so far."""


@attrs.frozen
class JobMoved(Event):
    """A copy was launched, has ended, or was discarded."""

    job: Job
    old: JobState
    new: JobState
    reason: str


@attrs.frozen
class StoreSkipped(Event):
    """The store policy wanted blocks that are not stored."""

    request: LedgerRequest | None
    """None for a write-back."""
    num_blocks: int
    reason: str
    """`host_full`, `disk_full` or `custom_full`: the tier has too few free blocks. `evicted`: the host has evicted the
    prefix. `in_flight`: too many stores are under way. `refused`: an extension grants no more blocks."""


@attrs.frozen
class StepBegun(Event):
    """A step holds the blocks of its requests."""

    step: Step
    num_blocks: int
    """Positions in the block tables of its requests."""


@attrs.frozen
class StepEnded(Event):
    """A step has ended, so blocks that only this step held are free. For a request that is over, these are its last
    blocks."""

    step: Step
    over: tuple[str, ...]
    """The ids of the step's requests that are over."""


@attrs.frozen
class ExtensionRefused(Event):
    """`extend_nowait` has raised `OutOfBlocks`, and nothing has changed. In `extend`, the request then waits in the
    queue."""

    request: LedgerRequest
    num_needed: int
    num_available: int


# -- of a copy queue ---------------------------------------------------------------------------------------------------


@attrs.frozen
class TransportStalled(Event):
    """`num_jobs` copies of a link took too long. The link launches nothing until they are over."""

    source: Tier
    destination: Tier
    num_jobs: int


@attrs.frozen
class TransportRecovered(Event):
    """The late copies of a link are over, and the link launches again."""

    source: Tier
    destination: Tier


@attrs.frozen
class WorkerFailed(Event):
    """The ledger or the copy worker raised an error that is a bug."""

    error: BaseException


@attrs.frozen
class CacheTurnedOff(Event):
    """The cache has turned itself off, and launches nothing more."""

    reason: str


# -- of a runtime ------------------------------------------------------------------------------------------------------


@attrs.frozen
class RequestCancelled(Event):
    """The `async with` block of a request is being cancelled. `RequestMoved` follows once its task has left it."""

    request: LedgerRequest
    reason: str


@attrs.frozen
class WaitedForBlocks(Event):
    """A wait for free blocks is over, however it ended."""

    request: LedgerRequest
    seconds: float


@attrs.frozen
class CompletionDelivered(Event):
    """The transport has delivered a completion. Reported in the transport's thread, before the ledger settles it."""

    completion: Completion

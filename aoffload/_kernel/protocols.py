"""Who else may hand out device blocks: pools and engines of any class. This file is never compiled, so that they can
derive from one of these.

Who is told which blocks are cached: of any class. This file is never compiled, so that it can derive from this.

Observers of state moves. An observer may be of any class. This file is never compiled, so that observers can derive
from its classes.

A ledger reports in the middle of a change, and it has to complete the change whatever an observer does. So the ledger
drops every exception of an observer, even a `BaseException`. Such an exception never is a cancellation of the task that
makes the change, because a task is cancelled only where it waits, and a report never waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from .records import Job, Part
from .requests import CacheTransfer, LedgerRequest, LoadOverlap, Pin, Step
from .states import CacheTransferState, JobState, OverlapState, PinState, RequestState
from .status import HintEnd, TierEviction


class DevicePool(Protocol):
    """Hands out block ids and takes them back: a `FreeList`, unless the blocks are engine-owned."""

    @property
    def num_blocks(self) -> int:
        """All usable blocks, without the null block."""
        ...

    @property
    def num_free(self) -> int: ...

    def take(self, num_blocks: int) -> array[int]:
        """Take exactly `num_blocks` ids. The caller has checked that there are enough."""
        ...

    def give(self, block_ids: array[int]) -> None: ...

    def free_ids(self) -> Iterable[int]: ...


class TakesIds(DevicePool, Protocol):
    """A pool of slots on a disk: what a restart has found is taken by its ids."""

    def are_free(self, block_ids: Sequence[int]) -> bool: ...

    def take_ids(self, block_ids: array[int]) -> None: ...


class EngineBlocks(Protocol):
    """What an engine is told of its device blocks.

    Both are called in the middle of ledger calls, also of those about other requests. They must neither raise nor call
    the ledger: they only count references of each block. A block may be held several times, and is given as often.
    """

    def hold(self, block_ids: array[int]) -> object:
        """A copy touches these blocks from now on: keep their contents, and do not reuse them, until `give`. vLLM:
        `touch`."""
        ...

    def give(self, block_ids: array[int]) -> object:
        """The copy does not touch them any more. vLLM: `free_blocks`."""
        ...


class FindsBlocks(EngineBlocks, Protocol):
    """For an engine that can find, in its prefix cache, blocks that a request's table no longer names."""

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """Blocks `[start, stop)` of a request's tokens in group number `group`; 0 for a block that the engine
        does not have, or that a forward will write that is not submitted yet. A `request_id` of
        `Ledger.deferred_requests` may be over: then it is the last request with that id."""
        ...


class BlockWatcher(Protocol):
    """Receives each change of the set of cached blocks, right after the change and in the middle of a call. It must not
    call the ledger. Its exceptions are dropped. Blocks that move from one run to another stay cached and are not
    reported."""

    def part_changed(self, part: Part, first: int, stop: int) -> object:
        """`part` held units `[first, stop)` of its run, and holds `[part.first, part.stop)` now."""

    def all_cleared(self, epoch: int) -> object:
        """Nothing is cached any more. What is cached later belongs to `epoch`."""


OBSERVES = (
    "request_moved job_moved store_skipped pin_moved cache_transfer_moved overlap_moved loads_paused loads_resumed "
    "step_begun step_ended extension_refused eviction_switched hint_given hint_ended"
)
"""The methods of an `Observer`."""


class Observer(Protocol):
    """Called after every state move. It must not call the ledger. Its exceptions are dropped. The telemetry is an
    observer."""

    def request_moved(self, request: LedgerRequest, old: RequestState, reason: str) -> object: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> object: ...
    def store_skipped(self, request: LedgerRequest | None, num_blocks: int, reason: str) -> object:
        """`request` is None for a write-back."""

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

    def extension_refused(self, request: LedgerRequest, num_needed: int, num_available: int) -> object:
        """`extend_nowait` has raised `OutOfBlocks`; nothing has changed. `extend` waits in line then."""

    def eviction_switched(self, tier: TierEviction) -> object:
        """Where eviction learns: from what was learned to the last use, or back. `tier.rule` rules from now on."""

    def hint_given(self, hint_id: int, category: str, num_tokens: int) -> object:
        """It spares so many tokens; 0 also where too few hints of its category come true."""

    def hint_ended(self, hint_id: int, category: str, end: HintEnd) -> object: ...


class NullObserver:
    """Does nothing: a base for observers of some moves only."""

    def request_moved(self, request: LedgerRequest, old: RequestState, reason: str) -> None: ...
    def job_moved(self, job: Job, old: JobState, reason: str) -> None: ...
    def store_skipped(self, request: LedgerRequest | None, num_blocks: int, reason: str) -> None: ...
    def pin_moved(self, pin: Pin, old: PinState) -> None: ...
    def cache_transfer_moved(self, transfer: CacheTransfer, old: CacheTransferState) -> None: ...
    def overlap_moved(self, overlap: LoadOverlap, old: OverlapState) -> None: ...
    def loads_paused(self, num_quarantined: int) -> None: ...
    def loads_resumed(self, num_quarantined: int) -> None: ...
    def step_begun(self, step: Step) -> None: ...
    def step_ended(self, step: Step) -> None: ...
    def extension_refused(self, request: LedgerRequest, num_needed: int, num_available: int) -> None: ...
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

"""Owners: what a request, a pin, and a transfer without a request own, each in one place.

A request is a `Holding`: everything it owns is given back in one call. While it waits for room it has a `Waiter`, while
a step runs on what its load still brings an `EarlyStart`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import attrs

from ..errors import OutOfBlocks
from .answer import NO_MATCH, PrefixMatch
from .lifecycle import EarlyState, ErrandState, PinState, RequestState
from .plan import Tier, TransferPlan
from .records import Claim, Job, Lease, Run
from .table import NO_LIMIT, BlockTable
from .tokens import TokenSequence

__all__ = [
    "Demotion",
    "EarlyStart",
    "Errand",
    "Extension",
    "Holding",
    "Pin",
    "Prefetch",
    "Waiter",
    "claimants",
    "nobody",
]

_UNREAD = (RequestState.QUEUED, RequestState.MATCHED, RequestState.PINNED, RequestState.LOADING)


@attrs.frozen
class Extension:
    """What `extend` changed in the block tables, a list per group."""

    added: list[list[int]]
    """Ids appended."""
    nulled: list[list[int]]
    """Positions that became null because their group needs them no more."""


@dataclass(slots=True, eq=False, repr=False)
class Holding(Claim):
    request_id: str
    sequence: TokenSequence
    epoch: int
    ticket: int
    """Its place in the line for room, kept when it has to queue again."""
    hit_limit: int
    """Units that a match may cover, and what they must be a multiple of."""
    ledger: object = field(kw_only=True)
    """Who admitted it: no other ledger takes it."""
    hit_alignment: int
    store_limit: int = field(default=NO_LIMIT, kw_only=True)
    """Up to which unit its tokens may be stored."""
    state: RequestState = RequestState.QUEUED
    reason: str = ""
    """Why it was aborted."""
    match: PrefixMatch = NO_MATCH
    origins: dict[Holding, int] = field(default_factory=dict)
    """Whom it was forked from, and how many tokens these had computed then."""
    engine_tokens: int = 0
    """Leading tokens that an engine with blocks of its own has there: the host is asked for what lies behind."""
    hit_stop: int = 0
    tables: tuple[BlockTable, ...] = ()
    """One for each band; no ids in it before it has room."""
    num_units: int = 0
    """What the tables reach to."""
    leases: dict[Tier, Lease] = field(default_factory=dict)
    """On the device what it reads, in the host what it wants to load."""
    reserve: Lease | None = None
    """On the device, too, what lies behind the device hit and its load would find there."""
    published: int = 0
    """Units that are findable, or were when it got them."""
    nulled: list[tuple[int, int, int]] = field(default_factory=list)
    """Units `[start, stop)` of a band that left its window since `extend` told last: (band, start, stop)."""
    ready_stop: int = 0
    """Units that were ready before anything was computed: hits, and what was loaded."""
    num_computed_tokens: int = 0
    has_committed: bool = False
    read_before: int = 0
    """Units that were findable when it was preempted last: it may have read what others had computed of them."""
    early: EarlyStart | None = None
    """A step has begun on what a load was still bringing."""
    has_lost_load: bool = False
    """A load failed and there was no room to compute instead, so it began again: this time it computes."""
    waiter: Waiter | None = None
    num_steps: int = 0
    """Forwards that touch its blocks now. It gives nothing back before they end."""
    when_idle: Callable[[], object] = lambda: None
    """Called when the last of them has ended."""

    def __repr__(self) -> str:
        return f"<Holding {self.request_id!r} {self.state.name} {self.num_blocks} blocks>"

    def __str__(self) -> str:
        return f"request {self.request_id}"

    @property
    def is_over(self) -> bool:
        return self.state in (RequestState.DONE, RequestState.ABORTED)

    @property
    def device_run(self) -> Run | None:
        """Where the path that it leases on the device ends."""
        lease = self.leases.get(Tier.DEVICE)
        return None if lease is None else lease.run

    @property
    def table(self) -> array[int]:
        """The block ids of the spine: of all groups of full attention."""
        return self.tables[0].ids if self.tables else array("i")

    @property
    def may_match_again(self) -> bool:
        """Whether its match is no more than pins: it has no block tables, and has not begun to compute with what it
        pins. Nobody else is ever matched again."""
        return not self.tables and self.state in _UNREAD

    @property
    def holds_room(self) -> bool:
        granted = self.waiter is not None and bool(self.waiter.granted)
        return self.num_units > 0 or granted or Tier.DEVICE in self.leases or self.reserve is not None

    def all_leases(self) -> list[Lease]:
        return [*self.leases.values()] if self.reserve is None else [*self.leases.values(), self.reserve]

    def private_blocks(self) -> array[int]:
        """The ids that are its own: nobody else reads or frees them."""
        found = array("i")
        for table in self.tables:
            found.extend(table.private(self.published))
        return found

    @property
    def lacks_blocks(self) -> bool:
        """Whether its load has failed, with the blocks under it, and it was told since that it can never fit."""
        return self.state is RequestState.LOADING and not self.tables and self.load is None and self.waiter is None

    @property
    def num_blocks(self) -> int:
        """Places in its block tables; those that are null by now are counted, too."""
        return sum(len(table.ids) for table in self.tables)


def claimants(job: Job) -> list[Holding]:
    """Who waits for `job`."""
    return [claim for claim in job.claims if isinstance(claim, Holding)]


def nobody() -> None:
    """A synchronous engine looks at `granted` and `error` itself."""


@dataclass(slots=True, eq=False, repr=False)
class Waiter:
    """One wait for room of one holding. Exactly one of `granted` and `error` is set when it is over."""

    holding: Holding
    num_units: int
    """Units in all: of the whole table."""
    wake: Callable[[], object] = nobody
    granted: array[int] | None = None
    error: OutOfBlocks | None = None
    num_missing: int = 0
    """Blocks that it lacked when it was looked at last."""
    changes_seen: int = -1
    """`TierBlocks.num_changes` of the device then; -1: it has to be looked at whatever has changed."""

    def __repr__(self) -> str:
        over = "granted" if self.granted is not None else "failed" if self.error else "waiting"
        return f"<Waiter {self.holding.request_id!r} {self.num_units} units {over}>"

    @property
    def is_over(self) -> bool:
        return self.granted is not None or self.error is not None

    def grant(self, blocks: array[int]) -> None:
        self.granted = blocks
        self.wake()

    def fail(self, error: OutOfBlocks) -> None:
        self.error = error
        self.wake()


@dataclass(slots=True, eq=False, repr=False)
class EarlyStart:
    holding: Holding
    stop: int
    """The unit up to which it takes its load for landed."""
    num_tokens: int
    """The same in tokens."""
    tables: tuple[array[int], ...]
    """What it takes the block tables for up to there, one for each band."""
    state: EarlyState = EarlyState.NEW

    def __str__(self) -> str:
        return f"early start of {self.holding}"


@dataclass(slots=True, eq=False, repr=False)
class Pin:
    """What `Ledger.pin` returns; ended by `Ledger.unpin`, its deadline, or one of the rules above. Once."""

    pin_id: int
    sequence: TokenSequence
    expires_at: float
    """By the clock of whoever calls `Ledger.lapse`."""
    ledger: object
    state: PinState = PinState.NEW
    match: PrefixMatch = NO_MATCH
    """What it keeps, or has kept."""
    leases: list[Lease] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Pin {self.pin_id} {self.state.name} {self.match.num_tokens} tokens>"

    def __str__(self) -> str:
        return f"pin {self.pin_id}"

    @property
    def has_lapsed(self) -> bool:
        """Whether its time was over before it was released."""
        return self.state is PinState.LAPSED

    def all_leases(self) -> list[Lease]:
        return self.leases


@dataclass(slots=True, eq=False, repr=False)
class Errand:
    holding: Holding
    wake: Callable[[], object]
    """Called once it is over."""
    state: ErrandState = ErrandState.NEW
    plans: tuple[TransferPlan, ...] = ()
    """To be launched. There may be none, and yet jobs of others to wait for."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.holding.request_id} {self.state.name}>"

    def __str__(self) -> str:
        return self.holding.request_id

    @property
    def is_over(self) -> bool:
        return self.state in (ErrandState.DONE, ErrandState.CANCELLED)


@dataclass(slots=True, eq=False, repr=False)
class Prefetch(Errand):
    num_blocks: int = 0
    """Device blocks that it has taken: they count while it is under way."""
    num_tokens: int = 0
    """Tokens of the prompt on the device when it was over."""


@dataclass(slots=True, eq=False, repr=False)
class Demotion(Errand):
    num_blocks: int = 0
    """Device blocks that it has given back."""

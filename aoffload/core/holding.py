"""A holding: everything one request owns, in one place, given back in one call."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from .index import Run
from .lease import Lease
from .lifecycle import RequestState
from .matching import NO_MATCH, PrefixMatch
from .plan import Tier
from .table import BlockTable, not_null
from .tokens import TokenSequence

if TYPE_CHECKING:
    from .early import EarlyStart
    from .jobs import Job
    from .waiting import Waiter

__all__ = ["NO_LIMIT", "Extension", "Holding", "Load", "Spare"]

NO_LIMIT = 2**62
"""As a number of units: everything."""
_UNREAD = (RequestState.QUEUED, RequestState.MATCHED, RequestState.PINNED, RequestState.LOADING)


@attrs.frozen
class Extension:
    """What `extend` changed in the block tables, a list per group."""

    added: list[list[int]]
    """Ids appended."""
    nulled: list[list[int]]
    """Positions that became null because their group needs them no more."""


@attrs.frozen
class Spare:
    """Ids that go back into the table of `band`, from unit `start` on, should a load not bring what belongs there."""

    band: int
    start: int
    ids: array[int]


@attrs.define(eq=False)
class Load:
    """A load that a holding waits for, up to unit `stop`."""

    stop: int
    wake: Callable[[], object]
    jobs: set[Job] = attrs.field(factory=set)
    """Jobs not settled yet, its own and shared ones."""
    spares: list[Spare] = attrs.field(factory=list)
    """What an engine has lent for it stays at hand while it runs, for nobody else could give it anew."""
    units_per_job: Sequence[int] = ()
    """What one job carries at most, for each band; empty: as much as any."""

    def set_aside(self, band: int, start: int, ids: array[int]) -> None:
        if ids:
            self.spares.append(Spare(band, start, ids))


@attrs.define(eq=False, repr=False)
class Holding:
    request_id: str
    sequence: TokenSequence
    epoch: int
    ticket: int
    """Its place in the line for room, kept when it has to queue again."""
    hit_limit: int
    """Units that a match may cover, and what they must be a multiple of."""
    ledger: object = attrs.field(kw_only=True)
    """Who admitted it: no other ledger takes it."""
    hit_alignment: int
    store_limit: int = attrs.field(default=NO_LIMIT, kw_only=True)
    """Up to which unit its tokens may be stored."""
    state: RequestState = RequestState.QUEUED
    reason: str = ""
    """Why it was aborted."""
    match: PrefixMatch = NO_MATCH
    origins: dict[Holding, int] = attrs.field(factory=dict)
    """Whom it was forked from, and how many tokens these had computed then."""
    lent_stop: int = 0
    """Units that an engine had computed already in blocks that it lends."""
    hit_stop: int = 0
    tables: tuple[BlockTable, ...] = ()
    """One for each band; no ids in it before it has room."""
    num_units: int = 0
    """What the tables reach to."""
    leases: dict[Tier, Lease] = attrs.field(factory=dict)
    """On the device what it reads, in the host what it wants to load."""
    reserve: Lease | None = None
    """On the device, too, what lies behind the device hit and its load would find there."""
    published: int = 0
    """Units that are findable, or were when it got them."""
    nulled: list[tuple[int, int, int]] = attrs.field(factory=list)
    """Units `[start, stop)` of a band that left its window since `extend` told last: (band, start, stop)."""
    ready_stop: int = 0
    """Units that were ready before anything was computed: hits, and what was loaded."""
    num_computed_tokens: int = 0
    has_committed: bool = False
    read_before: int = 0
    """Units that were findable when it was preempted last: it may have read what others had computed of them."""
    load: Load | None = None
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
        for spare in self.load.spares if self.load is not None else ():
            found.extend(not_null(spare.ids))
        return found

    @property
    def lacks_blocks(self) -> bool:
        """Whether a load has failed in a way that took the place of what it was to bring: `lend` to it again."""
        return self.state is RequestState.LOADING and not self.tables and self.waiter is None

    @property
    def num_blocks(self) -> int:
        """Places in its block tables; those that are null by now are counted, too."""
        return sum(len(table.ids) for table in self.tables)

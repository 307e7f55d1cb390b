"""Owners: what a request, a pin, and a transfer without a request own, each in one place.

A request is a `Holding`: everything it owns is given back in one call. While it waits for room it has a `Waiter`, while
a step runs on what its load still brings an `LoadOverlap`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import attrs

from ..errors import OutOfBlocks
from .answer import NO_MATCH, PrefixMatch
from .lifecycle import OverlapState, RequestState
from .plan import Tier
from .records import Claim, Job, Lease, NoIndex, Run
from .table import NO_LIMIT, BlockTable
from .tokens import TokenSequence

__all__ = [
    "LoadOverlap",
    "Extension",
    "Holding",
    "Waiter",
    "claimants",
    "nobody",
]

_UNREAD = (
    RequestState.QUEUED, RequestState.MATCHED, RequestState.PINNED, RequestState.REQUEUED, RequestState.STRANDED,
)  # fmt: skip
_UNDER_WAY = (RequestState.LOADING, RequestState.DRAINING, RequestState.REQUEUED)


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
    epoch: int | NoIndex
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
    overlap: LoadOverlap | None = None
    """A step has begun on what a load was still bringing."""
    num_lost_tokens: int = 0
    """Tokens that its loads were to bring and have not."""
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
        """Whether its match is no more than pins: it has no block tables. Nobody else is ever matched again."""
        return self.state in _UNREAD

    @property
    def is_loading(self) -> bool:
        """Whether its load is not over: it waits for copies, for a step that began on it, or for room again."""
        return self.state in _UNDER_WAY

    @property
    def holds_room(self) -> bool:
        granted = self.waiter is not None and bool(self.waiter.granted)
        return self.num_units > 0 or granted or Tier.DEVICE in self.leases or self.reserve is not None

    def all_leases(self) -> list[Lease]:
        return [*self.leases.values()] if self.reserve is None else [*self.leases.values(), self.reserve]

    # -- what happens to it: nobody else writes its fields ----------------------------------------------------------

    def matched(self, device_stop: int, hit_stop: int, match: PrefixMatch) -> None:
        self.published = self.ready_stop = device_stop
        self.hit_stop = hit_stop
        self.match = match

    def asked_behind(self, num_tokens: int) -> None:
        """An engine has the first `num_tokens` itself."""
        self.engine_tokens = num_tokens

    def told(self, match: PrefixMatch) -> None:
        """It was told of `match`, and pins nothing of it."""
        self.match = match

    def hit_up_to(self, stop: int) -> None:
        self.hit_stop = stop

    def taken_back(self, start: int, num_tokens: int) -> None:
        """Nothing from unit `start` on was right, nor what was computed behind `num_tokens`."""
        self.published, self.ready_stop = min(self.published, start), min(self.ready_stop, start)
        self.num_computed_tokens = num_tokens

    def forgot_match(self) -> None:
        self.published = self.ready_stop = self.hit_stop = 0

    def given_tables(self, tables: tuple[BlockTable, ...], num_units: int) -> None:
        self.tables, self.num_units = tables, num_units

    def gave_up_tables(self) -> None:
        self.tables, self.num_units, self.load = (), 0, None
        self.nulled.clear()

    def slid(self, band: int, start: int, stop: int) -> None:
        """Units `[start, stop)` of a band have left its window."""
        self.nulled.append((band, start, stop))

    def take_nulled(self) -> list[tuple[int, int, int]]:
        """What has left windows since this was asked last."""
        nulled, self.nulled = self.nulled, []
        return nulled

    def ready_up_to(self, stop: int, num_tokens: int) -> None:
        """Up to unit `stop` all is on the device; what is before `num_tokens` counts as computed."""
        self.published = self.ready_stop = stop
        self.num_computed_tokens = num_tokens

    def published_up_to(self, stop: int) -> None:
        self.published = stop

    def computed(self, num_tokens: int) -> None:
        self.num_computed_tokens = num_tokens

    def narrow_hit(self, stop: int) -> None:
        """Its match may cover no more than `stop` units."""
        self.hit_limit = stop

    def committed(self, num_tokens: int) -> None:
        self.num_computed_tokens = num_tokens
        self.has_committed = True

    def lost(self, num_tokens: int) -> None:
        """Its load ended, and has not brought `num_tokens` of what it was to bring."""
        self.num_lost_tokens += num_tokens

    def preempted(self, unit_tokens: int) -> None:
        # How far its match might go was said of the prompt; what it has computed itself is its own.
        self.hit_limit = max(self.hit_limit, self.num_computed_tokens // unit_tokens)
        self.had_read(self.published)
        self.published = self.ready_stop = 0

    def had_read(self, stop: int) -> None:
        """It lets go of what was findable up to unit `stop`, and may have read what others had computed of it."""
        self.read_before = max(self.read_before, stop)

    def forked_from(self, parent: Holding, shared: int, match: PrefixMatch) -> None:
        self.matched(shared, shared, match)
        self.num_computed_tokens = parent.num_computed_tokens
        self.origins = {origin: stop for origin, stop in parent.origins.items() if not origin.is_over}
        self.origins[parent] = parent.num_computed_tokens

    def began_step(self) -> None:
        self.num_steps += 1

    def ended_step(self) -> bool:
        """Whether no other forward touches its blocks."""
        self.num_steps -= 1
        return not self.num_steps

    def aborted(self, reason: str) -> None:
        self.reason = reason

    def taint(self) -> None:
        """It has read what was wrong: nothing of it is published any more."""
        self.epoch = NoIndex.INVALIDATED

    def orphan(self) -> None:
        """A reset of the device has made its blocks unfindable."""
        self.epoch = NoIndex.ORPHANED

    def private_blocks(self) -> array[int]:
        """The ids that are its own: nobody else reads or frees them."""
        found = array("i")
        for table in self.tables:
            found.extend(table.private(self.published))
        return found

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

    def wake_by(self, wake: Callable[[], object]) -> None:
        """Another task waits for it now."""
        self.wake = wake

    def take_back(self) -> array[int]:
        """The grant that nobody has accepted, which it has no more."""
        granted, self.granted = self.granted, None
        assert granted is not None
        return granted

    def give_back(self) -> array[int]:
        """The grant of who does not want it any more. It is over all the same."""
        granted, self.granted = self.granted, array("i")
        assert granted is not None
        return granted

    def grant(self, blocks: array[int]) -> None:
        self.granted = blocks

    def fail(self, error: OutOfBlocks) -> None:
        self.error = error


@dataclass(slots=True, eq=False, repr=False)
class LoadOverlap:
    holding: Holding
    stop: int
    """The unit up to which it takes its load for landed."""
    num_tokens: int
    """The same in tokens."""
    tables: tuple[array[int], ...]
    """What it takes the block tables for up to there, one for each band."""
    state: OverlapState = OverlapState.NEW

    def __str__(self) -> str:
        return f"early start of {self.holding}"

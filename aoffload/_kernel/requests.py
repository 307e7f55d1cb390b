"""Owners: everything that one request or one cache transfer owns, in one place.

A request is a `LedgerRequest`: one call gives back everything it owns. It has a `Waiter` while it waits for room, and a
`LoadOverlap` once a step has begun before its load is over.

What keeps blocks beside a request: pins, prefetches, fetches, demotions and steps, and what each owns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import OutOfBlocks
from .plans import NO_MATCH, PrefixMatch, TransferPlan
from .records import NO_LIMIT, BlockTable, Lease, Load, Run
from .states import CacheTransferState, Computing, NoEpoch, OverlapState, PinState, RequestState, Tier
from .tokens import TokenSequence

__all__ = [
    "CacheTransfer",
    "Demotion",
    "Fetch",
    "LedgerRequest",
    "LoadOverlap",
    "Pin",
    "Prefetch",
    "Step",
    "Waiter",
    "call_all",
    "nobody",
]


_UNREAD = (
    RequestState.QUEUED, RequestState.MATCHED, RequestState.PINNED, RequestState.REQUEUED, RequestState.STRANDED,
)  # fmt: skip
_UNDER_WAY = (RequestState.LOADING, RequestState.DRAINING, RequestState.REQUEUED)


class Fetched:
    """What a fetch has brought for a request, pinned in the host until the request has blocks to load it into."""

    __slots__ = ("lease", "num_host_blocks")

    def __init__(self, lease: Lease, num_host_blocks: int) -> None:
        self.lease = lease
        self.num_host_blocks = num_host_blocks


class LedgerRequest:
    __slots__ = (
        "computing", "engine_tokens", "epoch", "evictions_before", "fetched", "has_committed",
        "hit_alignment", "hit_limit", "hit_stop", "last_step", "leases", "ledger", "load", "match", "nulled",
        "num_computed_tokens", "num_lost_tokens", "num_steps", "num_units", "origins", "overlap", "published",
        "read_before", "ready_stop", "reason", "request_id", "reserve", "retry_max_hit_tokens", "sequence",
        "since_s", "state", "store_limit", "stored_stop", "tables", "ticket", "uses", "waiter", "when_idle",
    )  # fmt: skip

    def __init__(
        self, request_id: str, sequence: TokenSequence, epoch: int | NoEpoch, ticket: int, hit_limit: int,
        hit_alignment: int, *, ledger: Any, evictions_before: int = 0, store_limit: int = NO_LIMIT,
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self.sequence = sequence
        self.epoch = epoch
        self.ticket = ticket
        """Its place in the line for room, kept when it has to queue again."""
        self.hit_limit = hit_limit
        """Maximum units of a match."""
        self.ledger = ledger
        """The ledger that admitted it. Others refuse it."""
        self.evictions_before = evictions_before
        """How many blocks the host had evicted when it was admitted."""
        self.stored_stop = 0
        """Engine-owned blocks: leading units that were in the host, or on their way there, after its last offer."""
        self.hit_alignment = hit_alignment
        """The units of a match are a multiple of this."""
        self.uses: tuple[tuple[int, int], ...] = ()
        """Where eviction learns: how often its prompt was asked for, as (stop, number)."""
        self.store_limit = store_limit
        """End of the units that may be stored."""
        self.state: RequestState = RequestState.QUEUED
        self.reason = ""
        """Why it was aborted, or will be: it was cancelled, and its task has not left it yet."""
        self.match: PrefixMatch = NO_MATCH
        self.origins: dict[LedgerRequest, int] = {}
        """The requests it descends from by forks, each with its number of computed tokens at that fork."""
        self.engine_tokens = 0
        """Leading tokens in the engine's own prefix cache (engine-owned blocks). The host match begins behind them."""
        self.hit_stop = 0
        self.load: Load | None = None
        """Until it is over."""
        self.tables: tuple[BlockTable, ...] = ()
        """One per band, once the request has room."""
        self.num_units = 0
        """Units that the tables cover."""
        self.leases: dict[Tier, Lease] = {}
        """Device: the cached path that it reads. Host: the path that it is to load."""
        self.reserve: Lease | None = None
        """With windows: a second device lease, for blocks behind the device hit that the load will find there."""
        self.fetched: Fetched | None = None
        """Beside the match, which a request in the line for room gives up."""
        self.published = 0
        """Leading units that are findable, or were when the request got them."""
        self.nulled: list[tuple[int, int, int]] = []
        """(band, start, stop): units that left the window of a band since the last `Extension`."""
        self.ready_stop = 0
        """Leading units that were ready before the request computed: hits, and what was loaded."""
        self.num_computed_tokens = 0
        self.has_committed = False
        self.read_before = 0
        """Leading units of which it may have read KV of others before its leases ended (preempted, or a fork)."""
        self.overlap: LoadOverlap | None = None
        """Set once a step has begun before the load was over."""
        self.num_lost_tokens = 0
        """Tokens that its loads failed to bring."""
        self.retry_max_hit_tokens: int | None = None
        """Engine-owned blocks: the `max_hit_tokens` for a next try of the same prompt. Where a load that fell short
        ended, so that the same copy is not tried for ever; None: no load fell short."""
        self.waiter: Waiter | None = None
        self.computing: Computing = Computing.NOTHING
        self.num_steps = 0
        """Forwards that touch its blocks. No block that they touch is given back before they end."""
        self.last_step = 0
        """The number of its last step that has ended, see `LastUses`. 0: there is none, or its blocks were used outside
        of steps since."""
        self.when_idle: Callable[[], object] = nobody
        """Called when the last of these forwards has ended."""
        self.since_s = 0.0
        """When it entered its state, where the ledger has a clock."""

    def __repr__(self) -> str:
        return f"<LedgerRequest {self.request_id!r} {self.state.name} {self.num_blocks} blocks>"

    def __str__(self) -> str:
        return f"request {self.request_id}"

    @property
    def is_over(self) -> bool:
        return self.state in (RequestState.DONE, RequestState.ABORTED)

    @property
    def may_be_preempted(self) -> bool:
        """Whether a preemption is allowed, if no step holds its blocks."""
        has_blocks = bool(self.tables) or self.state in (RequestState.REQUEUED, RequestState.STRANDED)
        waits = self.waiter is not None and self.state is not RequestState.REQUEUED
        return has_blocks and not waits and not self.is_over

    @property
    def device_run(self) -> Run | None:
        """The last run of the path that it leases on the device."""
        lease = self.leases.get(Tier.DEVICE)
        return None if lease is None else lease.run

    @property
    def table(self) -> array[int]:
        """The block ids of full attention, of all its groups."""
        return self.tables[0].ids if self.tables else array("i")

    @property
    def may_match_again(self) -> bool:
        """Whether its match is only pins, without block tables. No other request is matched again."""
        return self.state in _UNREAD

    @property
    def is_loading(self) -> bool:
        """Whether its load is not over: it waits for copies, for an overlapping step, or for room again."""
        return self.state in _UNDER_WAY

    @property
    def holds_room(self) -> bool:
        granted = self.waiter is not None and bool(self.waiter.granted)
        return self.num_units > 0 or granted or Tier.DEVICE in self.leases or self.reserve is not None

    @property
    def match_leases(self) -> list[Lease]:
        return [*self.leases.values()] if self.reserve is None else [self.reserve, *self.leases.values()]

    def all_leases(self) -> list[Lease]:
        return self.match_leases if self.fetched is None else [self.fetched.lease, *self.match_leases]

    # -- events ---------------------------------------------------------------------------------------------------

    def matched(self, device_stop: int, hit_stop: int, match: PrefixMatch) -> None:
        self.published = self.ready_stop = device_stop
        self.hit_stop = hit_stop
        self.match = match

    def asked_for(self, uses: tuple[tuple[int, int], ...]) -> None:
        self.uses = uses

    def stored_up_to(self, stop: int) -> None:
        self.stored_stop = stop

    def asked_behind(self, num_tokens: int) -> None:
        """The engine has the first `num_tokens` in its own cache."""
        self.engine_tokens = num_tokens

    def told(self, match: PrefixMatch) -> None:
        """Record `match` as the answer given; nothing of it is pinned."""
        self.match = match

    def hit_up_to(self, stop: int) -> None:
        self.hit_stop = stop

    def taken_back(self, start: int, num_tokens: int) -> None:
        """Units from `start` on, and everything computed behind `num_tokens`, are invalidated."""
        self.published, self.ready_stop = min(self.published, start), min(self.ready_stop, start)
        self.num_computed_tokens = num_tokens

    def forgot_match(self) -> list[Lease]:
        """Returns its leases, which the caller releases."""
        leases = [*self.leases.values()] if self.reserve is None else [self.reserve, *self.leases.values()]
        self.leases, self.reserve = {}, None
        self.published = self.ready_stop = self.hit_stop = 0
        return leases

    def keeps_fetched(self, fetched: Fetched) -> None:
        self.fetched = fetched

    def take_fetched(self) -> Fetched | None:
        """Return and clear `fetched`."""
        fetched, self.fetched = self.fetched, None
        return fetched

    def given_tables(self, tables: tuple[BlockTable, ...], num_units: int) -> None:
        self.tables, self.num_units = tables, num_units

    def gave_up_tables(self) -> None:
        self.tables, self.num_units, self.load, self.nulled = (), 0, None, []

    def slid(self, band: int, start: int, stop: int) -> None:
        """Units `[start, stop)` of a band have left its window."""
        self.nulled.append((band, start, stop))

    def take_nulled(self) -> list[tuple[int, int, int]]:
        """Return and clear `nulled`."""
        nulled, self.nulled = self.nulled, []
        return nulled

    def ready_up_to(self, stop: int, num_tokens: int) -> None:
        """All units before `stop` are on the device; the first `num_tokens` count as computed."""
        self.published = self.ready_stop = stop
        self.num_computed_tokens = num_tokens

    def published_up_to(self, stop: int) -> None:
        self.published = stop

    def computed(self, num_tokens: int) -> None:
        self.num_computed_tokens = num_tokens

    def counts_as(self, num_computed_tokens: int, published: int) -> None:
        """Set both totals for a question to the store policy, which is asked before they are true."""
        self.num_computed_tokens, self.published = num_computed_tokens, published

    def narrow_hit(self, stop: int) -> None:
        """Lower the maximum of a match to `stop` units."""
        self.hit_limit = stop

    def committed(self, num_tokens: int) -> None:
        self.num_computed_tokens = num_tokens
        self.has_committed, self.computing = True, Computing.NOTHING

    def lost(self, num_tokens: int) -> None:
        """Its load failed to bring `num_tokens`."""
        self.num_lost_tokens += num_tokens

    def retry_up_to(self, num_tokens: int) -> None:
        """Its load fell short behind `num_tokens`."""
        self.retry_max_hit_tokens = num_tokens

    def preempted(self, unit_tokens: int) -> None:
        # The caller's limit is about the prompt. What the request itself has computed may always be matched.
        self.hit_limit = max(self.hit_limit, self.num_computed_tokens // unit_tokens)
        self.had_read(self.published)
        self.published = self.ready_stop = 0
        if self.computing is Computing.ITS_BLOCKS:
            self.computing = Computing.LOST_BLOCKS

    def had_read(self, stop: int) -> None:
        """It gives up its leases, and may have read KV of other requests for units before `stop`."""
        self.read_before = max(self.read_before, stop)

    def forked_from(self, parent: LedgerRequest, shared: int, match: PrefixMatch) -> None:
        self.matched(shared, shared, match)
        self.num_computed_tokens = parent.num_computed_tokens
        self.origins = {origin: stop for origin, stop in parent.origins.items() if not origin.is_over}
        self.origins[parent] = parent.num_computed_tokens

    def began_step(self) -> None:
        self.num_steps += 1
        self.computing = Computing.ITS_BLOCKS

    def ended_step(self, number: int) -> bool:
        """Whether that was the last forward that touches its blocks. `number`: of the step, see `LastUses`."""
        self.num_steps -= 1
        self.last_step = number
        return not self.num_steps

    def used_outside_of_steps(self) -> None:
        self.last_step = 0

    def ends_for(self, reason: str) -> None:
        self.reason = reason

    def taint(self) -> None:
        """It may have read wrong KV: nothing of it is published any more."""
        self.epoch = NoEpoch.INVALIDATED

    def orphan(self) -> None:
        """A reset of the device tier has made its blocks unfindable."""
        self.epoch = NoEpoch.ORPHANED

    def private_blocks(self) -> array[int]:
        """Ids of the blocks that only this request reads and frees."""
        found = array("i")
        for table in self.tables:
            found.extend(table.private(self.published))
        return found

    @property
    def num_blocks(self) -> int:
        """Positions in its block tables, including null ones."""
        return sum(len(table.ids) for table in self.tables)

    @property
    def num_held(self) -> int:
        """Blocks in its tables, without null ones."""
        return sum(table.num_held for table in self.tables)


def nobody() -> None:
    """Default `wake`: does nothing."""


def call_all(wakes: Iterator[Callable[[], object]]) -> None:
    """Call all `wakes`, even after one of them raises, because each wakes another request."""
    try:
        for wake in wakes:
            wake()
    except BaseException:
        call_all(wakes)
        raise


class Waiter:
    """One wait of one request for room. When it is over, exactly one of `granted` and `error` is set."""

    __slots__ = ("changes_seen", "error", "granted", "joined_s", "num_missing", "num_units", "request", "wake")

    def __init__(self, request: LedgerRequest, num_units: int, wake: Callable[[], object] = nobody) -> None:
        self.request = request
        self.num_units = num_units
        """Units of the whole table, not only those to add."""
        self.wake = wake
        self.granted: array[int] | None = None
        self.error: OutOfBlocks | None = None
        self.num_missing = 0
        """Blocks that it lacked when `serve_queue` last examined it."""
        self.changes_seen = -1
        """`TierBlocks.num_changes` of the device at that time; -1: examine it in any case."""
        self.joined_s: float | None = None
        """When it joined the line, where the ledger has a clock."""

    def __repr__(self) -> str:
        over = "granted" if self.granted is not None else "failed" if self.error else "waiting"
        return f"<Waiter {self.request.request_id!r} {self.num_units} units {over}>"

    @property
    def is_over(self) -> bool:
        return self.granted is not None or self.error is not None

    def joined(self, now: float) -> None:
        """It joins the line. One whose grant was taken back joins again, and waits since it joined first."""
        if self.joined_s is None:
            self.joined_s = now

    def wake_by(self, wake: Callable[[], object]) -> None:
        """Replace `wake`: another task waits for the room."""
        self.wake = wake

    def take_back(self) -> array[int]:
        """Remove and return the unaccepted grant. The waiter is waiting again."""
        granted, self.granted = self.granted, None
        assert granted is not None
        return granted

    def give_back(self) -> array[int]:
        """Remove and return the unwanted grant. The waiter stays over."""
        granted, self.granted = self.granted, array("i")
        assert granted is not None
        return granted

    def grant(self, blocks: array[int]) -> None:
        self.granted = blocks

    def fail(self, error: OutOfBlocks) -> None:
        self.error = error


@dataclass(slots=True, eq=False, repr=False)
class LoadOverlap:
    request: LedgerRequest
    stop: int
    """The step assumes that the load succeeds up to this unit."""
    num_tokens: int
    """The same in tokens."""
    tables: tuple[array[int], ...]
    """The block tables up to there as the step assumes them, one per band."""
    state: OverlapState = OverlapState.NEW

    def __str__(self) -> str:
        return f"load overlap of {self.request}"


@dataclass(slots=True, eq=False, repr=False)
class Pin:
    """What `Ledger.pin` returns. Ends once: by `unpin`, its deadline, `drop_pins` or `reset`, or to make room."""

    pin_id: int
    sequence: TokenSequence
    expires_at: float
    """By the clock whose time `Ledger.lapse` is given."""
    ledger: Any
    state: PinState = PinState.NEW
    match: PrefixMatch = NO_MATCH
    """What it keeps, or has kept."""
    leases: list[Lease] = field(default_factory=list)
    since_s: float = 0.0
    """When it entered its state, where the ledger has a clock."""

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
class CacheTransfer:
    request: LedgerRequest
    wake: Callable[[], object]
    """Called once it is over."""
    state: CacheTransferState = CacheTransferState.NEW
    plans: tuple[TransferPlan, ...] = ()
    """To be launched. Even without any, it may wait for jobs of other requests."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request.request_id} {self.state.name}>"

    def __str__(self) -> str:
        return self.request.request_id

    @property
    def is_over(self) -> bool:
        return self.state in (CacheTransferState.DONE, CacheTransferState.CANCELLED)


@dataclass(slots=True, eq=False, repr=False)
class Prefetch(CacheTransfer):
    num_blocks: int = 0
    """Device blocks that it has taken: they count in the share of all prefetches while it is under way."""
    num_tokens: int = 0
    """Tokens of the prompt on the device when it was over."""


@dataclass(slots=True, eq=False, repr=False)
class Demotion(CacheTransfer):
    num_blocks: int = 0
    """Device blocks that it has given back."""


@dataclass(slots=True, eq=False, repr=False)
class Fetch(CacheTransfer):
    for_request: LedgerRequest | None = None
    """Who waits for it; None for one that was begun ahead."""
    num_blocks: int = 0
    """Host blocks that it has taken: they count in the share of all fetches while it is under way."""
    num_tokens: int = 0
    """Tokens that a request for the prompt would have hit when it was over, on the device and in the host."""


@dataclass(slots=True, eq=False, repr=False)
class Step:
    """A forward over the blocks of `requests`, which it holds until it ends, also of requests that are over."""

    step_id: int
    requests: tuple[LedgerRequest, ...]
    begun_s: float = 0.0
    """Where the ledger has a clock."""

    def __repr__(self) -> str:
        return f"<Step {self.step_id} {' '.join(request.request_id for request in self.requests)}>"

    @property
    def num_blocks(self) -> int:
        """Device blocks that it holds; those that requests share count for each of them."""
        return sum(request.num_held for request in dict.fromkeys(self.requests))

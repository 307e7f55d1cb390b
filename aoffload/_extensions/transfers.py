"""Cache transfers: copies for the cache, for which no request waits.

    prefetch    host -> device    load the hit of a prompt, before a request for the prompt comes
    demotion    device -> host    store the units of a prompt that the host lacks, and free its device blocks
    fetch       below  -> host    copy the units of a prompt that only lower tiers hold, so that a request hits them

A cache transfer has its own `LedgerRequest`. This record is matched and has a load like any request, so jobs, leases
and the index treat it like one. But the record is not live: it never joins the wait queue and computes nothing. When
its load is over or cancelled, the record releases everything. The blocks that have landed stay cached, unpinned.

`CacheTransfers` begins and ends them. `prefetch.py` has prefetches and demotions, `_tiers.fetch` has fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import attrs

from .._common.arguments import shown
from .._common.tiers import BELOW
from .._kernel.base import CacheBase
from .._kernel.events import Event
from .._kernel.extension import LedgerExtension
from .._kernel.index import Hit, find_hit, jobs_into
from .._kernel.plans import TransferPlan
from .._kernel.records import NO_LIMIT, Job, LedgerRequest, Load
from .._kernel.states import Plain, State
from .._kernel.tokens import TokenSequence
from ..errors import InvalidArgument


class CacheTransferState(Plain):
    """The states of a prefetch, a demotion or a fetch (docs/lifecycle.md)."""

    NEW = "new"
    MOVING = "moving"
    DONE = "done"
    CANCELLED = "cancelled"


CACHE_TRANSFER_MOVES: Mapping[State, frozenset[State]] = {
    CacheTransferState.NEW: frozenset({CacheTransferState.MOVING, CacheTransferState.DONE}),
    CacheTransferState.MOVING: frozenset({CacheTransferState.DONE, CacheTransferState.CANCELLED}),
    CacheTransferState.DONE: frozenset(),
    CacheTransferState.CANCELLED: frozenset(),
}


@dataclass(slots=True, eq=False, repr=False)
class CacheTransfer:
    """Base of prefetches, demotions and fetches: a transfer for the cache, for which no request waits."""

    request: LedgerRequest
    """The record that owns the leases and the load of the transfer. It is not a live request."""
    wake: Callable[[], object]
    """Called once the transfer is over."""
    state: CacheTransferState = CacheTransferState.NEW
    plans: tuple[TransferPlan, ...] = ()
    """The copies to launch. A transfer without plans may still wait for jobs of other requests."""
    when_over: Callable[[CacheTransferState], object] | None = None
    """Called when the leases of the transfer are released, before its last event."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request.request_id} {self.state.name}>"

    def __str__(self) -> str:
        return self.request.request_id

    @property
    def is_over(self) -> bool:
        return self.state in (CacheTransferState.DONE, CacheTransferState.CANCELLED)


@dataclass(slots=True, eq=False, repr=False)
class Fetch(CacheTransfer):
    """A copy of a prompt from the tiers below the host into host memory. Returned by `fetches.fetch`."""

    for_request: LedgerRequest | None = None
    """The request that waits for the fetch; None if no request waits yet."""
    num_blocks: int = 0
    """Host blocks that the fetch has taken. They count toward `max_fetch_share` while it is under way."""
    num_tokens: int = 0
    """Tokens that a request for the prompt would have hit, on the device and in the host, when the fetch was over."""


@attrs.frozen
class CacheTransferMoved(Event):
    """A prefetch, demotion or fetch has begun or ended."""

    transfer: CacheTransfer
    old: CacheTransferState
    new: CacheTransferState


class CacheTransfers(LedgerExtension):
    """Cancels prefetches, demotions and fetches (`HostCache.transfers`)."""

    def __init__(self) -> None:
        self.under_way: dict[LedgerRequest, CacheTransfer] = {}
        self.num_cache_transfers = 0
        """Cache transfers begun so far."""

    def on_attach(self, ledger: CacheBase) -> None:
        self._ledger, self.cache, self.moves = ledger, ledger.cache, ledger.moves
        self.request_leases = ledger.request_leases

    def report_requests(self) -> Iterable[LedgerRequest]:
        return self.under_way

    # -- the verbs ------------------------------------------------------------------------------------------------

    def cancel(self, transfer: CacheTransfer) -> None:
        """Cancel a prefetch, a fetch or a demotion. Does nothing if it is over. Launched copies and all stores
        continue."""
        if not isinstance(transfer, CacheTransfer) or transfer.request.ledger is not self._ledger:
            raise InvalidArgument("transfer", f"was not begun by this ledger: {shown(transfer)}")
        self._ledger.hooks.refuse_verb()
        if not transfer.is_over:
            load = transfer.request.load
            settled = [] if load is None else self._ledger.jobs.abandon(load)
            self._end(transfer, CacheTransferState.CANCELLED)
            self._ledger.end_call([*self._ledger.jobs.end_claims(settled), transfer.wake])

    def cancel_all(self) -> None:
        """Cancel every transfer under way."""
        for transfer in tuple(self.under_way.values()):
            self.cancel(transfer)

    # -- begin and end ---------------------------------------------------------------------------------------------

    def new_request(self, kind: str, sequence: TokenSequence, limit: int) -> LedgerRequest:
        self.num_cache_transfers += 1
        name = f"{kind}-{self.num_cache_transfers}"
        # The ticket is before the tickets of all requests, so that if one call ends several loads, transfers release
        # blocks before requests take blocks.
        ticket = self.num_cache_transfers - NO_LIMIT
        return LedgerRequest(name, sequence, self.cache.epoch, ticket, limit, 1, ledger=self._ledger)

    def wait_for_jobs(self, transfer: CacheTransfer) -> None:
        """Begin a load that waits for all jobs under way that bring blocks on the path of `transfer` into the host,
        including jobs of other requests."""
        request, jobs = transfer.request, dict[Job, None]()
        for run, _ in self.cache.index.walk(request.sequence, request.hit_limit):
            for part in run.parts_in(BELOW):
                jobs.update(dict.fromkeys(jobs_into(part)))
        if jobs:
            over = partial(self.over, transfer)
            request.load = Load(request.hit_limit, transfer.wake, over, request.ticket, jobs)

    def begin(self, transfer: CacheTransfer) -> None:
        """Begin `transfer`. If it has nothing to wait for, it ends immediately."""
        request = transfer.request
        if request.load is None or not request.load.jobs:
            self._end(transfer, CacheTransferState.DONE)
            return
        self.under_way[request] = transfer
        self._move(transfer, CacheTransferState.MOVING)

    def over(self, transfer: CacheTransfer) -> list[Callable[[], object]]:
        """The load of `transfer` is over: see `Load.conclude`."""
        self._end(transfer, CacheTransferState.DONE)
        return [transfer.wake]

    def _end(self, transfer: CacheTransfer, state: CacheTransferState) -> None:
        self.under_way.pop(transfer.request, None)
        self.request_leases.release_all(transfer.request)
        if transfer.when_over is not None:
            transfer.when_over(state)
        self._move(transfer, state)

    def hit_of(self, sequence: TokenSequence) -> Hit:
        """The hit that a request for `sequence` would get now."""
        layout = self.cache.layout
        return find_hit(self.cache.index, sequence, layout, (sequence.num_tokens - 1) // layout.unit_tokens)

    def _move(self, transfer: CacheTransfer, state: CacheTransferState) -> None:
        old = self.moves.other(transfer, state, CACHE_TRANSFER_MOVES)
        self.moves.note(CacheTransferMoved(transfer, old, state))

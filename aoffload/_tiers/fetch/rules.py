"""Fetches: cache transfers from the tiers below the host into the host.

A request hits only on the device and in the host. KV of its prompt that only a lower tier holds is fetched into the
host first; then the request is matched again (`match_again`).

    unit 0 [ in the host, or on its way there | on the disk, or in a custom tier | in cells of the remote store )

The index knows which units the disk and a custom tier hold. Only the remote store knows which cells it holds, so the
caller asks the store and passes the end of these cells. If several tiers hold a unit, the fetch reads it from the first
of them in the order of `Tier`.

Until a fetch is over, it pins in the host the units that it brings and the units before them. All fetches under way
take at most `max_share` of the host; a larger fetch brings only its leading units. After the fetch, the brought blocks
are kept for its request while the request waits for device blocks. The same share bounds these blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..._common.arguments import check_callable, check_int
from ..._common.prefix import TOKEN_BYTES, Prefix
from ..._common.tiers import BELOW, HIT_TIERS, Tier
from ..._extensions.transfers import CacheTransfers, CacheTransferState, Fetch
from ..._kernel.cache import PrefixCache
from ..._kernel.extension import LedgerExtension
from ..._kernel.index import accepted, covered, find_hit, lower_path, stretches
from ..._kernel.jobs import Stores, left_of
from ..._kernel.leases import RequestLeases
from ..._kernel.ledger import CoreLedger
from ..._kernel.plans import PrefixMatch
from ..._kernel.records import Job, Lease, LedgerRequest, Run, do_nothing
from ..._kernel.states import RequestState as State
from ..._kernel.states import require
from ..._kernel.tokens import TokenSequence
from ..._kernel.waiting import waiting_error
from ...errors import InvalidArgument
from ..remote.extension import RemoteExtension
from ..remote.plans import CellLabel
from ..remote.rules import cells_before, places_in_cells


@dataclass(slots=True)
class _Kept:
    """A host lease on a fetched prefix, kept until its request has device blocks for the load. The request keeps this
    lease in the wait queue, where it gives up the leases of its match."""

    lease: Lease
    num_blocks: int


class Fetches(LedgerExtension):
    """Begins fetches from the tiers below the host (`Ledger.fetches`, `HostCache.fetches`)."""

    def __init__(self) -> None:
        self._kept: dict[LedgerRequest, _Kept] = {}

    def on_attach(self, ledger: Any) -> None:
        self._ledger = ledger
        self.cache: PrefixCache = ledger.cache
        self.request_leases: RequestLeases = ledger.request_leases
        self.max_share = ledger.config.max_fetch_share
        self._remote: RemoteExtension | None = ledger.find(RemoteExtension)
        indexed = [tier.tier for tier in ledger.cache.tiers[BELOW + 1 :] if not tier.is_absent]
        self.sources = [Stores(ledger.cache, ledger.jobs, ledger.moves, tier, Tier.HOST) for tier in indexed]
        """Plans the copies from each tier that the index knows."""
        self.from_remote = None
        if self._remote is not None:
            self.from_remote = Stores(ledger.cache, ledger.jobs, ledger.moves, Tier.REMOTE, Tier.HOST)

    @property
    def transfers(self) -> CacheTransfers:
        found: CacheTransfers = self._ledger.transfers
        return found

    # -- the verbs ------------------------------------------------------------------------------------------------

    def fetch(
        self,
        prefix: Prefix,
        wake: Callable[[], object] = do_nothing,
        *,
        num_remote_tokens: int = 0,
        for_request: LedgerRequest | None = None,
    ) -> Fetch:
        """Start copying the units of `prefix` that only lower tiers hold to the host. Launch the `plans` of the fetch.
        Ask the remote store for the whole cells that it has of `prefix`, and pass the end of the last one as
        `num_remote_tokens`. The fetch then loads these cells, too, if no tier in the index holds their units.

        All fetches together take at most `max_fetch_share` of the host; a larger fetch brings only its leading units.
        Two fetches of one prefix share the copies. A fetch ends at the first cell that the store does not hold. `wake`
        is called once the fetch is over. Call `match_again` inside of `wake`, so that no block is evicted in between.
        `for_request`: the request that waits for the fetch, which the reports and the log name.
        """
        check_callable("wake", wake)
        if for_request is not None:
            self._ledger.own(for_request)
        sequence = self._ledger.sequence_of(prefix)
        remote_stop = check_int("num_remote_tokens", num_remote_tokens, 0) // self.cache.layout.unit_tokens
        cell_tokens = 0 if self._remote is None else self._remote.cell_units * self.cache.layout.unit_tokens
        if num_remote_tokens and (not cell_tokens or num_remote_tokens % cell_tokens):
            raise InvalidArgument("num_remote_tokens", f"must be whole cells of {cell_tokens} tokens")
        fetch = self._fetch(sequence, wake, remote_stop, for_request)
        self._ledger.end_call()
        return fetch

    def match_again(self, request: LedgerRequest) -> PrefixMatch:
        """Match a PINNED request again and pin the hit, in one call, after a fetch has brought more blocks. Refused
        while the request is in the wait queue, and once it has device blocks."""
        require(self._ledger.own(request), "match_again", State.PINNED)
        if request.waiter is not None:
            raise waiting_error(request, "match_again")
        self._ledger.rematch(request)
        self._keep(request)
        self._ledger.end_call()
        return request.match

    def num_blocks(self, prefix: Prefix) -> int:
        """Number of blocks that a fetch of `prefix` would copy now from the tiers that the index knows, without blocks
        that jobs bring already."""
        sequence = self._ledger.sequence_of(prefix)
        path, stop = self._in_index(sequence, self._limit(sequence), self._num_allowed())
        return self._num_lacking(path[-1], stop) if stop else 0

    def num_remote_blocks(self, prefix: Prefix, num_remote_tokens: int) -> int:
        """Number of blocks that a fetch of `prefix` would load now from the cells with its first `num_remote_tokens`
        tokens, without blocks that tiers in the index hold or that jobs bring already."""
        sequence = self._ledger.sequence_of(prefix)
        remote_stop = check_int("num_remote_tokens", num_remote_tokens, 0) // self.cache.layout.unit_tokens
        limit = min(self._limit(sequence), remote_stop)
        start = max(self._in_index(sequence, limit, self._num_allowed())[1], self._in_host(sequence, limit))
        return (limit - start) * self.cache.layout.full.width

    # -- blocks kept for requests that wait for device blocks -----------------------------------------------------

    def _keep(self, request: LedgerRequest) -> None:
        """Pin the host hit, which was just fetched for the request, until the request has block tables. All these pins
        keep at most `max_share` of the host; a hit beyond that may be evicted."""
        self._end_kept(request)
        lease = request.leases.get(BELOW)
        if lease is None or not isinstance(self._ledger, CoreLedger):
            return
        most = int(self.cache.tiers[Tier.HOST].pool.num_blocks * self.max_share)
        num_blocks = self.cache.layout.num_blocks(request.published, request.published, request.hit_stop)
        if sum(kept.num_blocks for kept in self._kept.values()) + num_blocks <= most:
            self._kept[request] = _Kept(self.cache.lease(BELOW, lease.run), num_blocks)

    def _end_kept(self, request: LedgerRequest) -> None:
        kept = self._kept.pop(request, None)
        if kept is not None:
            self.cache.release(kept.lease)

    def on_allocated(self, request: LedgerRequest) -> None:
        self._end_kept(request)  # the leases of the match pin the same blocks from here on

    def on_leaving(self, request: LedgerRequest, is_last: bool) -> None:
        self._end_kept(request)

    def on_withdrawn(self) -> None:
        for request, kept in tuple(self._kept.items()):
            if any(part.tombstones for run in kept.lease.run.path() for part in run.parts_in(BELOW)):
                self._end_kept(request)

    def on_resetting(self, tier: Tier | None) -> None:
        if tier is None or tier in HIT_TIERS:
            for request in tuple(self._kept):
                self._end_kept(request)

    def report_leases(self) -> Iterable[Lease]:
        return [kept.lease for kept in self._kept.values()]

    # -- the fetch itself -----------------------------------------------------------------------------------------

    def _fetch(
        self,
        sequence: TokenSequence,
        wake: Callable[[], object],
        remote_stop: int,
        for_request: LedgerRequest | None,
    ) -> Fetch:
        """Begin a fetch of the units of `sequence` after its hit: units that the indexed tiers hold, and cells that the
        remote store has before unit `remote_stop`, as far as the share of the host allows. `for_request` waits for the
        fetch."""
        layout, limit = self.cache.layout, self._limit(sequence)
        request = self.transfers.new_request("fetch", sequence, limit)
        transfer = Fetch(request, wake, for_request=for_request)
        transfer.when_over = partial(self._fetched, transfer)
        hit = find_hit(self.cache.index, sequence, layout, limit).stop
        most = self._num_allowed()
        path, indexed = self._in_index(sequence, limit, most)
        start, cells = indexed, tuple[CellLabel, ...]()
        if self._remote is not None and remote_stop:
            start = max(start, self._in_host(sequence, min(limit, remote_stop)))
            left = most - self._num_lacking(path[-1], indexed) if indexed else most
            cells = self._cells(self._remote, sequence, start, min(limit, remote_stop, start + left // layout.width))
        stop = cells[-1].stop if cells else start
        if stop > hit:
            request.hit_limit = stop
            run = self.cache.path_to(sequence, stop) if stop > indexed else self.cache.cut(path[-1], stop)
            request.leases[Tier.HOST] = self.cache.lease(Tier.HOST, run)
            jobs: list[Job] = []
            for source in self.sources if indexed else ():
                jobs += source.offer_with_windows(request, run, 0, indexed, most=left_of(most, jobs))
            if self.from_remote is not None and cells:
                over = stretches(run, start, stop)
                cell_units = cells[0].stop - cells[0].start
                places = places_in_cells(start, stop, cell_units, layout.full.width)
                jobs += self.from_remote.store(
                    request, layout.full, over, places, left_of(most, jobs), (cell_units,), cells
                )
            transfer.num_blocks = sum(job.plan.num_blocks for job in jobs)
            transfer.plans = tuple(job.plan for job in jobs)
            self.transfers.wait_for_jobs(transfer)
        self.transfers.begin(transfer)
        return transfer

    def _fetched(self, transfer: Fetch, _: CacheTransferState) -> None:
        transfer.num_tokens = self.transfers.hit_of(transfer.request.sequence).stop * self.cache.layout.unit_tokens

    def _limit(self, sequence: TokenSequence) -> int:
        """Number of units that a request may hit, because a request computes at least one token."""
        return (sequence.num_tokens - 1) // self.cache.layout.unit_tokens

    def _num_allowed(self) -> int:
        """Number of host blocks that one more fetch may take."""
        under_way = self.transfers.under_way.values()
        taken = sum(transfer.num_blocks for transfer in under_way if isinstance(transfer, Fetch))
        host = self.cache.tiers[Tier.HOST]
        return min(int(host.pool.num_blocks * self.max_share) - taken, host.num_available)

    def _in_index(self, sequence: TokenSequence, limit: int, most: int) -> tuple[list[Run], int]:
        """The path of `sequence`, and the unit up to which the host can hold it after a fetch of at most `most` blocks
        from the indexed tiers."""
        if not self.sources:
            return [], 0
        layout = self.cache.layout
        path, stop = lower_path(self.cache.index, sequence, layout, limit)
        while stop > 0 and (excess := self._num_lacking(path[-1], stop) - most) > 0:
            stop = accepted(layout, path, stop - -(-excess // layout.width), self.cache.index.tiers)
        return path, max(0, stop)

    def _num_lacking(self, run: Run, stop: int) -> int:
        """Number of blocks, of a hit that ends at unit `stop`, that the host lacks and no job under way brings."""
        found = 0
        for manager in self.cache.managers:
            component, pieces = manager.component, list[tuple[int, int]]()
            for source in self.sources:
                lacking = manager.lacking(run, source.source, Tier.HOST, component.first_unit(stop), stop)
                pieces += [(first, last) for _, first, last in lacking]
            reached = 0
            for first, last in sorted(pieces):  # a unit that several tiers hold counts once
                found += max(0, last - max(first, reached)) * component.width
                reached = max(reached, last)
        return found

    def _in_host(self, sequence: TokenSequence, limit: int) -> int:
        """The unit, at most `limit`, up to which the host holds `sequence`, or will hold it once the jobs under way
        have landed."""
        stop = 0
        for run, agreed in self.cache.index.walk(sequence, limit):
            stop = min(covered(run.parts[Tier.HOST])[1], agreed)
            if stop < run.stop:
                break
        return stop

    @staticmethod
    def _cells(remote: RemoteExtension, sequence: TokenSequence, start: int, stop: int) -> tuple[CellLabel, ...]:
        """The whole cells with units of `[start, stop)`, up to the first cell that holds invalidated KV in the
        store."""
        found = [cell for cell in cells_before(sequence, stop, remote.cell_units) if cell.stop > start]
        wrong = [number for number, cell in enumerate(found) if cell.digest in remote.stores.forgotten]
        return tuple(found[: wrong[0]] if wrong else found)


def first_tokens(prefix: Prefix, num_tokens: int) -> Prefix:
    """A prefix of `num_tokens` + 1 tokens, whose hit is at most `num_tokens`, because the last token is always
    computed."""
    if prefix.spans or num_tokens + 1 >= prefix.num_tokens:
        return prefix
    return Prefix(prefix.root, prefix.tokens[: (num_tokens + 1) * TOKEN_BYTES])

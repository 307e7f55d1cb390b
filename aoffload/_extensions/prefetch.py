"""Prefetches and demotions: cache transfers that no request waits for. `Fetches` has those from the disk.

A cache transfer has a `LedgerRequest` of its own, which is matched and has a load, like any other. It never joins the
wait queue and computes nothing. When its jobs are over, it releases everything; what has landed stays cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .._kernel.cache import PrefixCache
from .._kernel.events import Moves
from .._kernel.index import Hit, find_hit, held_stop, jobs_into
from .._kernel.jobs import Stores
from .._kernel.leases import RequestLeases
from .._kernel.loads import Loads
from .._kernel.records import BlockTable, Job, Lease, Load, Run, nulls
from .._kernel.requests import CacheTransfer, Demotion, Fetch, LedgerRequest, Prefetch
from .._kernel.states import CacheTransferState, Tier
from .._kernel.tokens import TokenSequence
from .._kernel.waiting import Admission

__all__ = ["CacheTransfers"]


@dataclass(slots=True, eq=False)
class CacheTransfers:
    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    loads: Loads
    stores: Stores
    admission: Admission
    max_share: float
    under_way: dict[LedgerRequest, CacheTransfer] = field(default_factory=dict)
    num_cache_transfers: int = 0
    """Cache transfers begun so far."""

    # -- fetching -------------------------------------------------------------------------------------------------

    def prefetch(self, sequence: TokenSequence, wake: Callable[[], object], ledger: object) -> Prefetch:
        """Load what a request for `sequence` would load, as far as there is room. Nothing while requests wait."""
        limit = (sequence.num_tokens - 1) // self.cache.layout.unit_tokens
        transfer = Prefetch(self.new_request("prefetch", sequence, limit, ledger), wake)
        request = transfer.request
        self.request_leases.pin(request)
        if self._take_room(transfer):
            stop = request.hit_stop
            jobs = self.loads.start(request, stop, lambda: None)
            transfer.num_blocks = sum(job.plan.num_blocks for job in jobs)
            transfer.plans = tuple(job.plan for job in jobs)
        self.begin(transfer)
        return transfer

    def _take_room(self, transfer: Prefetch) -> bool:
        """Take room for the hit, or for as much of its front as fits; False: no room, or nothing to load."""
        request = transfer.request
        for _ in range(2):
            if request.hit_stop <= request.published or not self.admission.queue.is_empty:
                return False
            first, excess = self._first_missing(request), self._excess(request)
            if excess <= 0:
                self._start_tables(request, first)
                return True
            full = self.cache.layout.full.width
            request.hit_limit = request.hit_stop - -(-excess // full) if full else 0
            if request.hit_limit <= first:
                return False
            self.request_leases.match_again(request)
        return False

    def _first_missing(self, request: LedgerRequest) -> int:
        """The unit up to which full attention is on the device, or on its way there."""
        path = request.leases[self.stores.destination].run.whole_path()
        return self.loads.on_its_way(path, request.published, request.hit_stop)[1]

    def _excess(self, request: LedgerRequest) -> int:
        """Blocks that it needs beyond the room, or beyond what is left of the share of all prefetches."""
        layout, stop = self.cache.layout, request.hit_stop
        wanted = (stop - self._first_missing(request)) * layout.full.width
        for band in layout.windows:
            wanted += (stop - max(request.published, band.first_unit(stop))) * band.width
        taken = sum(transfer.num_blocks for transfer in self.under_way.values() if isinstance(transfer, Prefetch))
        share = int(self.admission.capacity * self.max_share) - taken
        return wanted - min(share, self.admission.num_available)

    def _start_tables(self, request: LedgerRequest, first: int) -> None:
        """Tables with full attention blocks only where nothing is, or is coming: no block is evicted for one that would
        be given back."""
        stop = request.hit_stop
        # They begin behind the device hit: a prefetch computes nothing that would read it.
        bands, start = self.cache.layout.bands, request.published
        request.tables = tuple(BlockTable(band.width, nulls(stop * band.width), start) for band in bands)
        request.num_units, full = stop, request.tables[0]
        full.fill(first, stop, self.cache.take(Tier.DEVICE, (stop - first) * full.width))

    # -- sending away ---------------------------------------------------------------------------------------------

    def demote(self, sequence: TokenSequence, wake: Callable[[], object], ledger: object) -> Demotion:
        """Store what the host lacks of `sequence`, and free its device blocks once the host could serve it alone."""
        transfer = Demotion(self.new_request("demotion", sequence, self._whole(sequence), ledger), wake)
        kept = self._keep_hit(sequence)
        leaving = self._leaving(sequence)
        if leaving:
            jobs = self._offer(transfer.request, leaving)
            transfer.plans = tuple(job.plan for job in jobs)
            self.wait_for_jobs(transfer.request)
        if kept is not None:
            self.cache.release(kept)
        self.begin(transfer)
        return transfer

    def _keep_hit(self, sequence: TokenSequence) -> Lease | None:
        """Pin the hit with its windows in the host, so that the stores do not evict them; None without windows.
        `Stores` pins full attention itself."""
        cache = self.cache
        hit = find_hit(cache.index, sequence, cache.layout, self._whole(sequence))
        if not cache.layout.windows or not hit.stop:
            return None
        return cache.lease(self.stores.destination, cache.cut(hit.path[-1], hit.stop))

    def _whole(self, sequence: TokenSequence) -> int:
        return sequence.num_tokens // self.cache.layout.unit_tokens

    def _leaving(self, sequence: TokenSequence) -> list[Run]:
        """The runs at the end of the path that only `sequence` needs on the device, last first: not pinned, no job
        under way to them, no other cached prompt behind them."""
        found: list[Run] = []
        walked = list(self.cache.index.walk(sequence, self._whole(sequence)))
        for run, agreed in reversed(walked):
            parts = run.parts_in(self.stores.source)
            is_needed = any(part.num_references or part.incoming is not None for part in parts)
            if agreed < run.stop or run.num_after > bool(found) or is_needed:
                break
            found.append(run)
        return found if any(part.blocks for run in found for part in run.parts_in(self.stores.source)) else []

    def _offer(self, request: LedgerRequest, leaving: list[Run]) -> list[Job]:
        end = next(run for run in leaving if any(part.blocks for part in run.parts_in(self.stores.source)))
        lease = self.cache.lease(self.stores.source, end, [end.stop for _ in self.cache.layout.windows])
        jobs = self.stores.offer(request, end, leaving[-1].start, end.stop, with_windows=True)
        self.cache.release(lease)  # the jobs have leases of their own
        return jobs

    def wait_for_jobs(self, request: LedgerRequest) -> None:
        """Wait for all jobs under way into the host on its path, those of other requests included."""
        jobs: dict[Job, None] = {}
        for run, _ in self.cache.index.walk(request.sequence, request.hit_limit):
            for part in run.parts_in(self.stores.destination):
                jobs.update(dict.fromkeys(jobs_into(part)))
        if jobs:
            request.began_load(Load(request.hit_limit, lambda: None, set(jobs)))
            for job in jobs:
                job.claimed_by(request)

    def _free(self, transfer: Demotion) -> None:
        """Free the device blocks that are still unpinned. If the host alone does not serve the whole hit, free none: a
        demotion shortens no hit."""
        cache, sequence = self.cache, transfer.request.sequence
        if transfer.request.epoch != cache.epoch:
            return
        hit = find_hit(cache.index, sequence, cache.layout, transfer.request.hit_limit)
        host_stop = held_stop(cache.layout, hit.path, self.stores.destination, 0, hit.stop)
        if host_stop < hit.stop or not _is_known_by(self.stores.destination, hit):
            return
        device = cache.tiers[self.stores.source]
        for run in self._leaving(sequence):
            for part in run.parts_in(self.stores.source):
                if part.blocks:
                    transfer.num_blocks += len(part.blocks)
                    device.trim(part, part.stop - part.first)
            cache.tidy(run)

    # -- both -----------------------------------------------------------------------------------------------------

    def new_request(self, kind: str, sequence: TokenSequence, limit: int, ledger: object) -> LedgerRequest:
        self.num_cache_transfers += 1
        name = f"{kind}-{self.num_cache_transfers}"
        return LedgerRequest(name, sequence, self.cache.epoch, self.num_cache_transfers, limit, 1, ledger=ledger)

    def begin(self, transfer: CacheTransfer) -> None:
        request = transfer.request
        if request.load is None or not request.load.jobs:
            self._end(transfer, CacheTransferState.DONE)
            return
        self.under_way[request] = transfer
        self.moves.cache_transfer(transfer, CacheTransferState.MOVING)

    def conclude(self, over: list[LedgerRequest]) -> list[Callable[[], object]]:
        """End the transfers among `over`; returns the callbacks to call after the line is served."""
        transfers = [self.under_way[request] for request in over if request in self.under_way]
        for transfer in transfers:
            self._end(transfer, CacheTransferState.DONE)
        return [transfer.wake for transfer in transfers]

    def cancel(self, transfer: CacheTransfer) -> list[Job]:
        """Stop waiting; returns the jobs that were discarded. Launched jobs and all stores go on."""
        settled = self.loads.abandon(transfer.request)
        self._end(transfer, CacheTransferState.CANCELLED)
        return settled

    def _end(self, transfer: CacheTransfer, state: CacheTransferState) -> None:
        self.under_way.pop(transfer.request, None)
        self.request_leases.let_go(transfer.request)
        if isinstance(transfer, Demotion) and state is CacheTransferState.DONE:
            self._free(transfer)
        if isinstance(transfer, Prefetch | Fetch):
            sequence, layout = transfer.request.sequence, self.cache.layout
            hit = find_hit(self.cache.index, sequence, layout, (sequence.num_tokens - 1) // layout.unit_tokens)
            stop = hit.device_stop if isinstance(transfer, Prefetch) else hit.stop
            transfer.num_tokens = stop * layout.unit_tokens
        self.moves.cache_transfer(transfer, state)


def _is_known_by(tier: Tier, hit: Hit) -> bool:
    """Whether `tier` holds a block of the last unit of `hit`, in any band. Windows may need none of them; but the index
    drops a run without any block."""
    if not hit.stop:
        return True
    parts = hit.run_at(hit.stop).parts_in(tier)
    return any(part.first < hit.stop <= part.stop for part in parts)

"""Cache transfers: prefetches and demotions. `_tiers.fetch` has fetches, which are cache transfers, too.

    prefetch    host -> device    load what a request for a prompt would load, before the request comes
    demotion    device -> host    store the units of a prompt that the host lacks, and free its device blocks
    fetch       below  -> host    copy the units of a prompt that only lower tiers hold, so that a request hits them

No request waits for a cache transfer. It has a `LedgerRequest` of its own, which is matched and has a load like that of
any request, so that jobs, leases and the index need not tell it apart. But that record is not live: it never joins the
wait queue and computes nothing, and when its load is over, or cancelled, it releases everything. The blocks that have
landed stay cached, unpinned. `Ledger` hands its transfers out as `CacheTransfer` objects.

A cache transfer must not harm requests. A prefetch takes free blocks only while no request waits for some, and all
prefetches under way take at most `max_share` of the device. A demotion frees a block only if no lease pins it, and only
if the host serves at least the same hit without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .._kernel.cache import PrefixCache
from .._kernel.index import find_hit, held_stop, jobs_into
from .._kernel.jobs import Stores
from .._kernel.leases import RequestLeases
from .._kernel.loads import Loads
from .._kernel.moves import Moves
from .._kernel.records import NO_LIMIT, BlockTable, Job, Lease, Load, Run, nulls
from .._kernel.requests import CacheTransfer, Demotion, Fetch, LedgerRequest, Prefetch
from .._kernel.states import CacheTransferState, Tier
from .._kernel.tokens import TokenSequence
from .._kernel.waiting import Admission


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

    # -- prefetch -------------------------------------------------------------------------------------------------

    def prefetch(self, sequence: TokenSequence, wake: Callable[[], object], ledger: object) -> Prefetch:
        """Load the units that a request for `sequence` would load, or as many of the leading ones as there are free
        blocks for. Load nothing while requests wait for blocks."""
        limit = (sequence.num_tokens - 1) // self.cache.layout.unit_tokens
        transfer = Prefetch(self.new_request("prefetch", sequence, limit, ledger), wake)
        request = transfer.request
        self.request_leases.pin(request)
        if self._take_blocks(request):
            jobs = self.loads.start(request, request.hit_stop, wake, partial(self._over, transfer))
            transfer.num_blocks = sum(job.plan.num_blocks for job in jobs)
            transfer.plans = tuple(job.plan for job in jobs)
        self.begin(transfer)
        return transfer

    def _take_blocks(self, request: LedgerRequest) -> bool:
        """Give `request` block tables with free blocks for its hit, or for as much of the front of its hit as fits.
        False: there are no free blocks, or there is nothing to load."""
        layout = self.cache.layout
        for _ in range(2):  # once more with the shorter hit
            start, stop = request.published, request.hit_stop
            if stop <= start or not self.admission.queue.is_empty:
                return False
            path = request.leases[self.stores.destination].run.whole_path()
            first = self.loads.on_its_way(path, start, stop)[1]  # before it, the device holds or gets all units
            wanted = (stop - first) * layout.full.width
            wanted += sum(
                (stop - max(start, component.first_unit(stop))) * component.width for component in layout.windows
            )
            taken = sum(transfer.num_blocks for transfer in self.under_way.values() if isinstance(transfer, Prefetch))
            share = int(self.admission.capacity * self.max_share) - taken
            excess = wanted - min(share, self.admission.num_available)
            if excess <= 0:
                # Full attention gets blocks only for missing units, because no block should be evicted for one that
                # the load gives back at once. The tables begin after the device hit: a prefetch does not read it.
                tables = [
                    BlockTable(component.width, nulls(stop * component.width), start) for component in layout.components
                ]
                tables[0].fill(first, stop, self.cache.take(Tier.DEVICE, (stop - first) * layout.full.width))
                request.tables, request.num_units = tuple(tables), stop
                return True
            request.hit_limit = stop - -(-excess // layout.full.width) if layout.full.width else 0
            if request.hit_limit <= first:
                return False
            self.request_leases.match_again(request)
        return False

    # -- demotion -------------------------------------------------------------------------------------------------

    def demote(self, sequence: TokenSequence, wake: Callable[[], object], ledger: object) -> Demotion:
        """Store the units of `sequence` that the host lacks, and free its device blocks once the host could serve it
        alone."""
        cache, limit = self.cache, sequence.num_tokens // self.cache.layout.unit_tokens
        transfer = Demotion(self.new_request("demotion", sequence, limit, ledger), wake)
        kept: Lease | None = None
        if cache.layout.windows:
            # The stores must not evict the windows of the hit in the host. `Stores` pins full attention itself.
            hit = find_hit(cache.index, sequence, cache.layout, limit)
            if hit.stop:
                kept = cache.lease(self.stores.destination, cache.cut(hit.path[-1], hit.stop))
        leaving = self._leaving(sequence)
        if leaving:
            end = next(run for run in leaving if any(part.blocks for part in run.parts_in(self.stores.source)))
            lease = cache.lease(self.stores.source, end, [end.stop for _ in cache.layout.windows])
            jobs = self.stores.offer(transfer.request, end, leaving[-1].start, end.stop, with_windows=True)
            cache.release(lease)  # the jobs have leases of their own
            transfer.plans = tuple(job.plan for job in jobs)
            self.wait_for_jobs(transfer)
        if kept is not None:
            cache.release(kept)
        self.begin(transfer)
        return transfer

    def _leaving(self, sequence: TokenSequence) -> list[Run]:
        """The runs at the end of the path of `sequence` that only this prompt needs on the device, last first: no lease
        pins them, no job adds to them, and no other cached prompt continues them. Empty if they hold no blocks there.
        """
        found: list[Run] = []
        walked = list(self.cache.index.walk(sequence, sequence.num_tokens // self.cache.layout.unit_tokens))
        for run, agreed in reversed(walked):
            parts = run.parts_in(self.stores.source)
            is_needed = any(part.num_references or part.incoming is not None for part in parts)
            if agreed < run.stop or run.num_after > bool(found) or is_needed:
                break
            found.append(run)
        return found if any(part.blocks for run in found for part in run.parts_in(self.stores.source)) else []

    def _free(self, transfer: Demotion) -> None:
        """Free the device blocks that are still unpinned. If the host alone does not serve the whole hit, free none,
        because a demotion shortens no hit."""
        cache, sequence, host = self.cache, transfer.request.sequence, self.stores.destination
        if transfer.request.epoch != cache.epoch:
            return
        hit = find_hit(cache.index, sequence, cache.layout, transfer.request.hit_limit)
        if held_stop(cache.layout, hit.path, host, 0, hit.stop) < hit.stop:
            return
        # The host must hold a block of the last unit, in any component. Windows may need none of them, but the index
        # drops a run without any block.
        if hit.stop and not any(part.first < hit.stop <= part.stop for part in hit.run_at(hit.stop).parts_in(host)):
            return
        device = cache.tiers[self.stores.source]
        for run in self._leaving(sequence):
            for part in run.parts_in(self.stores.source):
                if part.blocks:
                    transfer.num_blocks += len(part.blocks)
                    device.trim(part, part.stop - part.first)
            cache.tidy(run)

    # -- all cache transfers --------------------------------------------------------------------------------------

    def new_request(self, kind: str, sequence: TokenSequence, limit: int, ledger: object) -> LedgerRequest:
        self.num_cache_transfers += 1
        name = f"{kind}-{self.num_cache_transfers}"
        # A ticket before those of all requests: if one call ends several loads, transfers release blocks before
        # requests take some.
        ticket = self.num_cache_transfers - NO_LIMIT
        return LedgerRequest(name, sequence, self.cache.epoch, ticket, limit, 1, ledger=ledger)

    def wait_for_jobs(self, transfer: CacheTransfer) -> None:
        """Begin a load that waits for all jobs under way into the host on the path of `transfer`, also for those of
        other requests."""
        request, jobs = transfer.request, dict[Job, None]()
        for run, _ in self.cache.index.walk(request.sequence, request.hit_limit):
            for part in run.parts_in(self.stores.destination):
                jobs.update(dict.fromkeys(jobs_into(part)))
        if jobs:
            over = partial(self._over, transfer)
            request.load = Load(request.hit_limit, transfer.wake, over, request.ticket, jobs)

    def begin(self, transfer: CacheTransfer) -> None:
        """Begin `transfer`; end it at once if it has nothing to wait for."""
        request = transfer.request
        if request.load is None or not request.load.jobs:
            self._end(transfer, CacheTransferState.DONE)
            return
        self.under_way[request] = transfer
        self.moves.cache_transfer(transfer, CacheTransferState.MOVING)

    def _over(self, transfer: CacheTransfer) -> list[Callable[[], object]]:
        """The load of `transfer` is over: see `Load.conclude`."""
        self._end(transfer, CacheTransferState.DONE)
        return [transfer.wake]

    def cancel(self, transfer: CacheTransfer) -> list[Job]:
        """Stop waiting. Launched jobs and all stores go on. Returns the jobs that this settles."""
        load = transfer.request.load
        settled = [] if load is None else self.loads.abandon(load)
        self._end(transfer, CacheTransferState.CANCELLED)
        return settled

    def _end(self, transfer: CacheTransfer, state: CacheTransferState) -> None:
        self.under_way.pop(transfer.request, None)
        self.request_leases.release_all(transfer.request)
        if isinstance(transfer, Demotion) and state is CacheTransferState.DONE:
            self._free(transfer)
        if isinstance(transfer, Prefetch | Fetch):
            sequence, layout = transfer.request.sequence, self.cache.layout
            hit = find_hit(self.cache.index, sequence, layout, (sequence.num_tokens - 1) // layout.unit_tokens)
            stop = hit.device_stop if isinstance(transfer, Prefetch) else hit.stop
            transfer.num_tokens = stop * layout.unit_tokens
        self.moves.cache_transfer(transfer, state)

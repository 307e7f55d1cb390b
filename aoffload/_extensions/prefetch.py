"""Prefetches and demotions: cache transfers between the device and the host.

They must not delay requests. A prefetch takes free blocks only while no request waits for blocks, and all prefetches
under way take at most `max_prefetch_share` of the device. A demotion frees a block only if no lease pins it, and if the
host alone serves at least the same hit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .._common.arguments import check_callable
from .._common.prefix import Prefix
from .._common.tiers import Tier
from .._kernel.index import find_hit, held_stop
from .._kernel.ledger import CoreLedger
from .._kernel.records import BlockTable, Lease, LedgerRequest, Run, do_nothing, nulls
from .._kernel.tokens import TokenSequence
from .transfers import CacheTransfer, CacheTransfers, CacheTransferState


@dataclass(slots=True, eq=False, repr=False)
class Prefetch(CacheTransfer):
    """A copy of a prompt from the host to the device, before a request needs it. Returned by `transfers.prefetch`."""

    num_blocks: int = 0
    """Device blocks that the prefetch has taken. They count toward `max_prefetch_share` while it is under way."""
    num_tokens: int = 0
    """Tokens of the prompt that were on the device when the prefetch was over."""


@dataclass(slots=True, eq=False, repr=False)
class Demotion(CacheTransfer):
    """A move of a prompt from the device to the host. Returned by `transfers.demote`."""

    num_blocks: int = 0
    """Device blocks that the demotion has freed."""


class DeviceTransfers(CacheTransfers):
    """Begins prefetches and demotions, and cancels all cache transfers (`Ledger.transfers`)."""

    def on_attach(self, ledger: CoreLedger) -> None:  # type: ignore[override]
        super().on_attach(ledger)
        self.loads, self.stores, self.admission = ledger.loads, ledger.stores, ledger.admission
        self.max_share = ledger.config.max_prefetch_share

    # -- prefetch -------------------------------------------------------------------------------------------------

    def prefetch(self, prefix: Prefix, wake: Callable[[], object] = do_nothing) -> Prefetch:
        """Start to load the host hit of `prefix`, as a request for `prefix` would. Launch the `plans` of the prefetch.
        If there are too few free blocks, only the leading units are loaded. Nothing is loaded while requests wait for
        blocks. `wake` is called once the prefetch is over."""
        check_callable("wake", wake)
        sequence = self._ledger.sequence_of(prefix)
        limit = (sequence.num_tokens - 1) // self.cache.layout.unit_tokens
        transfer = Prefetch(self.new_request("prefetch", sequence, limit), wake)
        transfer.when_over = partial(self._prefetched, transfer)
        request = transfer.request
        self.request_leases.pin(request)
        if self._take_blocks(request):
            jobs = self.loads.start(request, request.hit_stop, wake, partial(self.over, transfer))
            transfer.num_blocks = sum(job.plan.num_blocks for job in jobs)
            transfer.plans = tuple(job.plan for job in jobs)
        self.begin(transfer)
        self._ledger.end_call()
        return transfer

    def _prefetched(self, transfer: Prefetch, _: CacheTransferState) -> None:
        hit = self.hit_of(transfer.request.sequence)
        transfer.num_tokens = hit.device_stop * self.cache.layout.unit_tokens

    def _take_blocks(self, request: LedgerRequest) -> bool:
        """Give `request` block tables with free blocks for its hit, or for as many leading units of the hit as there
        are free blocks. False: there are no free blocks, or there is nothing to load."""
        layout = self.cache.layout
        for _ in range(2):  # a second time with the shorter hit
            start, stop = request.published, request.hit_stop
            if stop <= start or not self.admission.queue.is_empty:
                return False
            path = request.leases[self.stores.destination].run.whole_path()
            first = self.loads.on_its_way(path, start, stop)[1]  # before it, the device holds or gets all units
            wanted = (stop - first) * layout.full.width
            wanted += sum(
                (stop - max(start, component.first_unit(stop))) * component.width for component in layout.partial
            )
            taken = sum(transfer.num_blocks for transfer in self.under_way.values() if isinstance(transfer, Prefetch))
            share = int(self.admission.capacity * self.max_share) - taken
            excess = wanted - min(share, self.admission.num_available)
            if excess <= 0:
                # Full attention gets blocks only for missing units, because no block should be evicted in exchange for
                # a block that the load gives back at once. The tables begin after the device hit, because a prefetch
                # does not read it.
                tables = [
                    BlockTable(component.width, nulls(stop * component.width), start) for component in layout.paged
                ]
                tables[0].fill(first, stop, self.cache.take(Tier.DEVICE, (stop - first) * layout.full.width))
                request.tables, request.num_units = tuple(tables), stop
                if request.checkpoints is not None and layout.recurrent is not None:
                    request.checkpoints.incoming = self.cache.take(Tier.DEVICE, layout.recurrent.width)
                return True
            request.hit_limit = stop - -(-excess // layout.full.width) if layout.full.width else 0
            if request.hit_limit <= first:
                return False
            self.request_leases.match_again(request)
        return False

    # -- demotion -------------------------------------------------------------------------------------------------

    def demote(self, prefix: Prefix, wake: Callable[[], object] = do_nothing) -> Demotion:
        """Start to move `prefix` from the device to the host. Launch the `plans` of the demotion: they store the units
        that the host lacks. The device blocks are freed once the host alone can serve the hit. `wake` is called once
        the demotion is over."""
        check_callable("wake", wake)
        sequence = self._ledger.sequence_of(prefix)
        cache, limit = self.cache, sequence.num_tokens // self.cache.layout.unit_tokens
        transfer = Demotion(self.new_request("demotion", sequence, limit), wake)
        transfer.when_over = partial(self._demoted, transfer)
        kept: Lease | None = None
        if cache.layout.partial:
            # The stores must not evict the windows and the checkpoint of the hit in the host. `Stores` pins full
            # attention itself.
            hit = find_hit(cache.index, sequence, cache.layout, limit)
            if hit.stop:
                kept = cache.lease(self.stores.destination, cache.cut(hit.path[-1], hit.stop))
        leaving = self.leaving(sequence)
        if leaving:
            end = next(run for run in leaving if any(part.blocks for part in run.parts_in(self.stores.source)))
            lease = cache.lease(self.stores.source, end, cache.layout.starts_of(cache.layout.full, 0, end.stop))
            jobs = self.stores.offer_with_windows(transfer.request, end, leaving[-1].start, end.stop)
            cache.release(lease)  # the jobs have leases of their own
            transfer.plans = tuple(job.plan for job in jobs)
        self.wait_for_jobs(transfer)  # also if only the stores of its own request keep the blocks
        if kept is not None:
            cache.release(kept)
        self.begin(transfer)
        self._ledger.end_call()
        return transfer

    def _demoted(self, transfer: Demotion, state: CacheTransferState) -> None:
        if state is CacheTransferState.DONE:
            self._free(transfer)

    def leaving(self, sequence: TokenSequence) -> list[Run]:
        """The runs at the end of the path of `sequence` that only this prompt needs on the device, the last one first:
        no lease pins them, no job adds to them, and no other cached prompt continues them. Empty if they have no device
        blocks.
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
        because a demotion must not shorten a hit."""
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
        for run in self.leaving(sequence):
            for part in run.parts_in(self.stores.source):
                if part.blocks:
                    transfer.num_blocks += len(part.blocks)
                    device.trim(part, part.stop - part.first)
            cache.tidy(run)

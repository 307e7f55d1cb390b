"""Fetches: cache transfers from the disk and from a remote store into the host.

A request hits only on the device and in the host. KV of its prompt that only a lower tier holds is fetched into the
host first; then the request is matched again (`Ledger.match_fetched`).

    unit 0 [ in the host, or on its way there | on the disk | in cells of the remote store )

The index knows which units the disk holds. Which cells the remote store holds, only the store knows, so the caller
asks the store and passes the end of these cells. Units that both tiers hold are read from the disk, which is nearer.

A fetch pins in the host the units that it brings and the units before them, until it is over. All fetches under way
take at most `max_share` of the host; a larger fetch brings only the front of its units. The same share bounds the
blocks that are kept for requests that wait for device blocks after their fetch is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..._extensions.prefetch import CacheTransfers
from ..._kernel.cache import PrefixCache
from ..._kernel.index import accepted, covered_stop, fetchable_path, find_hit, stretches
from ..._kernel.jobs import Stores, left_of
from ..._kernel.leases import RequestLeases
from ..._kernel.records import Job, Run
from ..._kernel.requests import Fetch, LedgerRequest
from ..._kernel.states import Tier
from ..._kernel.tokens import TokenSequence
from ..remote.plans import CellLabel
from ..remote.rules import RemoteStores, cells_before, places_in_cells


@dataclass(slots=True, eq=False)
class Fetches:
    cache: PrefixCache
    request_leases: RequestLeases
    transfers: CacheTransfers
    max_share: float
    from_disk: Stores | None
    from_remote: Stores | None
    remote: RemoteStores | None

    def fetch(
        self,
        sequence: TokenSequence,
        wake: Callable[[], object],
        ledger: object,
        remote_stop: int = 0,
        for_request: LedgerRequest | None = None,
    ) -> Fetch:
        """Copy into the host the units that the disk has of `sequence` after its hit, and the cells that a remote store
        has of it before unit `remote_stop`, as far as the host may hold them. `for_request` waits for the fetch."""
        layout, limit = self.cache.layout, self._limit(sequence)
        request = self.transfers.new_request("fetch", sequence, limit, ledger)
        transfer = Fetch(request, wake, for_request=for_request)
        hit = find_hit(self.cache.index, sequence, layout, limit).stop
        most = self._num_allowed()
        path, on_disk = self._on_disk(sequence, limit, most)
        start, cells = on_disk, tuple[CellLabel, ...]()
        if self.remote is not None and remote_stop:
            start = max(start, self._in_host(sequence, min(limit, remote_stop)))
            left = most - self._num_lacking(path[-1], on_disk) if on_disk else most
            cells = self._cells(self.remote, sequence, start, min(limit, remote_stop, start + left // layout.width))
        stop = cells[-1].stop if cells else start
        if stop > hit:
            request.hit_limit = stop
            run = self.cache.path_to(sequence, stop) if stop > on_disk else self.cache.cut(path[-1], stop)
            request.leases[Tier.HOST] = self.cache.lease(Tier.HOST, run)
            jobs: list[Job] = []
            if self.from_disk is not None and on_disk:
                jobs = self.from_disk.offer(request, run, 0, on_disk, with_windows=True, most=most)
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

    def keep(self, request: LedgerRequest) -> None:
        """Keep the host hit of `request`, which was fetched for it, until the request has device blocks to load it
        into."""
        host = self.cache.tiers[Tier.HOST]
        self.request_leases.keep_fetched(request, int(host.pool.num_blocks * self.max_share))

    def num_blocks(self, sequence: TokenSequence) -> int:
        """Blocks that a fetch of `sequence` would copy from the disk, without those that jobs under way bring."""
        path, stop = self._on_disk(sequence, self._limit(sequence), self._num_allowed())
        return self._num_lacking(path[-1], stop) if stop else 0

    def num_remote_blocks(self, sequence: TokenSequence, remote_stop: int) -> int:
        """Blocks that a fetch of `sequence` would load from the cells before unit `remote_stop`, without those that the
        disk holds or that jobs under way bring."""
        limit = min(self._limit(sequence), remote_stop)
        start = max(self._on_disk(sequence, limit, self._num_allowed())[1], self._in_host(sequence, limit))
        return (limit - start) * self.cache.layout.full.width

    def _limit(self, sequence: TokenSequence) -> int:
        """Units that a request may hit, because it computes at least one token."""
        return (sequence.num_tokens - 1) // self.cache.layout.unit_tokens

    def _num_allowed(self) -> int:
        """Host blocks that one more fetch may take."""
        under_way = self.transfers.under_way.values()
        taken = sum(transfer.num_blocks for transfer in under_way if isinstance(transfer, Fetch))
        host = self.cache.tiers[Tier.HOST]
        return min(int(host.pool.num_blocks * self.max_share) - taken, host.num_available)

    def _on_disk(self, sequence: TokenSequence, limit: int, most: int) -> tuple[list[Run], int]:
        """The path of `sequence`, and the unit up to which a fetch of at most `most` blocks from the disk can make the
        host hold it."""
        if self.from_disk is None:
            return [], 0
        layout = self.cache.layout
        path, stop = fetchable_path(self.cache.index, sequence, layout, limit)
        while stop > 0 and (excess := self._num_lacking(path[-1], stop) - most) > 0:
            stop = accepted(layout, path, stop - -(-excess // layout.width), self.cache.index.tiers)
        return path, max(0, stop)

    def _num_lacking(self, run: Run, stop: int) -> int:
        """Blocks of a hit that ends at unit `stop` that the host lacks and that no job under way brings."""
        found = 0
        for manager in self.cache.managers:
            component = manager.component
            lacking = manager.lacking(run, Tier.DISK, Tier.HOST, component.first_unit(stop), stop)
            found += sum(last - first for _, first, last in lacking) * component.width
        return found

    def _in_host(self, sequence: TokenSequence, limit: int) -> int:
        """The unit, at most `limit`, up to which the host holds `sequence`, or will once jobs under way have landed."""
        stop = 0
        for run, agreed in self.cache.index.walk(sequence, limit):
            stop = min(covered_stop(run.parts[Tier.HOST]), agreed)
            if stop < run.stop:
                break
        return stop

    @staticmethod
    def _cells(remote: RemoteStores, sequence: TokenSequence, start: int, stop: int) -> tuple[CellLabel, ...]:
        """The whole cells with units of `[start, stop)`, up to the first cell whose contents are wrong in the store."""
        found = [cell for cell in cells_before(sequence, stop, remote.cell_units) if cell.stop > start]
        wrong = [number for number, cell in enumerate(found) if cell.digest in remote.forgotten]
        return tuple(found[: wrong[0]] if wrong else found)

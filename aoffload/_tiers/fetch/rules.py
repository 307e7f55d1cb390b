"""Fetches: cache transfers from the disk and from a remote store into the host, so that a request hits there what only
these had.

    unit 0 [ in the host, or on its way there | on the disk | in cells of the remote store )

A fetch pins in the host what it brings and what is there already, until it is over. All fetches together take at most a
share of the host: of what exceeds it, the front is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..._extensions.prefetch import CacheTransfers
from ..._kernel.cache import PrefixCache
from ..._kernel.index import accepted, covered_stop, fetchable_path, find_hit, stretches
from ..._kernel.jobs import Stores, left_of
from ..._kernel.leases import RequestLeases
from ..._kernel.plans import CellLabel
from ..._kernel.records import Job, Run
from ..._kernel.requests import Fetch, LedgerRequest
from ..._kernel.states import CACHE_TIERS, Tier
from ..._kernel.tokens import TokenSequence
from ..remote.rules import RemoteStores, cells_before, places_in_cells

__all__ = ["Fetches"]


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
        """Copy into the host what the disk has of `sequence` behind its hit, and the cells that a remote store has of
        it before unit `remote_stop`, as far as there is room. `for_request` waits for it."""
        layout, limit = self.cache.layout, self._limit(sequence)
        transfer = Fetch(self.transfers.new_request("fetch", sequence, limit, ledger), wake, for_request=for_request)
        hit = find_hit(self.cache.index, sequence, layout, limit).stop
        room = self._room()
        path, on_disk = self._on_disk(sequence, limit, room)
        start, cells = on_disk, tuple[CellLabel, ...]()
        if self.remote is not None and remote_stop:
            start = max(start, self._in_host(sequence, min(limit, remote_stop)))
            left = room - self._num_lacking(path[-1], on_disk) if on_disk else room
            cells = self._cells(self.remote, sequence, start, min(limit, remote_stop, start + left // layout.width))
        stop = cells[-1].stop if cells else start
        if stop > hit:
            request = transfer.request
            request.hit_limit = stop
            run = self.cache.path_to(sequence, stop) if stop > on_disk else self.cache.cut(path[-1], stop)
            request.leases[Tier.HOST] = self.cache.lease(Tier.HOST, run)
            jobs = self._load(transfer, on_disk, start, cells, room)
            transfer.num_blocks = sum(job.plan.num_blocks for job in jobs)
            transfer.plans = tuple(job.plan for job in jobs)
            self.transfers.wait_for_jobs(request)
        self.transfers.begin(transfer)
        return transfer

    def keep(self, request: LedgerRequest) -> None:
        """Keep in the host what was fetched for `request` until it has room, within the share of all fetches."""
        host = self.cache.tiers[Tier.HOST]
        self.request_leases.keep_fetched(request, int(host.pool.num_blocks * self.max_share))

    def num_blocks(self, sequence: TokenSequence) -> int:
        """Blocks that a fetch of `sequence` would copy from the disk: none that others bring already."""
        path, stop = self._on_disk(sequence, self._limit(sequence), self._room())
        return self._num_lacking(path[-1], stop) if stop else 0

    def num_remote_blocks(self, sequence: TokenSequence, remote_stop: int) -> int:
        """Blocks that it would load from cells before unit `remote_stop`: none that others bring already."""
        limit = min(self._limit(sequence), remote_stop)
        start = max(self._on_disk(sequence, limit, self._room())[1], self._in_host(sequence, limit))
        return (limit - start) * self.cache.layout.full.width

    def _limit(self, sequence: TokenSequence) -> int:
        """Units that a request may hit: it computes one token at least."""
        return (sequence.num_tokens - 1) // self.cache.layout.unit_tokens

    def _room(self) -> int:
        """Host blocks that one more fetch may take."""
        under_way = self.transfers.under_way.values()
        taken = sum(transfer.num_blocks for transfer in under_way if isinstance(transfer, Fetch))
        host = self.cache.tiers[Tier.HOST]
        return min(int(host.pool.num_blocks * self.max_share) - taken, host.num_available)

    def _on_disk(self, sequence: TokenSequence, limit: int, room: int) -> tuple[list[Run], int]:
        """The path of `sequence`, and the unit up to which `room` blocks let the host hold it, with what the disk
        has."""
        if self.from_disk is None:
            return [], 0
        layout = self.cache.layout
        path, stop = fetchable_path(self.cache.index, sequence, layout, limit)
        while stop > 0 and (excess := self._num_lacking(path[-1], stop) - room) > 0:
            stop = accepted(layout, path, stop - -(-excess // layout.width), CACHE_TIERS)
        return path, max(0, stop)

    def _num_lacking(self, run: Run, stop: int) -> int:
        """Blocks that the host lacks, and that no job under way brings, of a hit that ends at unit `stop`."""
        found = 0
        for component in self.cache.components:
            band = component.band
            lacking = component.lacking(run, Tier.DISK, Tier.HOST, band.first_unit(stop), stop)
            found += sum(last - first for _, first, last in lacking) * band.width
        return found

    def _in_host(self, sequence: TokenSequence, limit: int) -> int:
        """The unit, at most `limit`, up to which the host holds `sequence`, or will from jobs under way."""
        stop = 0
        for run, agreed in self.cache.index.walk(sequence, limit):
            stop = min(covered_stop(run.parts[Tier.HOST]), agreed)
            if stop < run.stop:
                break
        return stop

    @staticmethod
    def _cells(remote: RemoteStores, sequence: TokenSequence, start: int, stop: int) -> tuple[CellLabel, ...]:
        """The whole cells with units of `[start, stop)`, before the first that is wrong in the store."""
        found = [cell for cell in cells_before(sequence, stop, remote.cell_units) if cell.stop > start]
        wrong = [number for number, cell in enumerate(found) if cell.digest in remote.forgotten]
        return tuple(found[: wrong[0]] if wrong else found)

    def _load(self, transfer: Fetch, on_disk: int, start: int, cells: tuple[CellLabel, ...], room: int) -> list[Job]:
        """Load units before `on_disk` from the disk, and those from `start` on from `cells`."""
        request, jobs = transfer.request, list[Job]()
        run = request.leases[Tier.HOST].run
        if self.from_disk is not None and on_disk:
            jobs = self.from_disk.offer(request, run, 0, on_disk, with_windows=True, most=room)
        if self.from_remote is not None and cells:
            full, over = self.cache.layout.full, stretches(run, start, cells[-1].stop)
            places = places_in_cells(start, cells[-1].stop, cells[0].stop - cells[0].start, full.width)
            jobs += self.from_remote.store(request, full, over, places, left_of(room, jobs), cells)
        return jobs

"""Pins: what a holding takes from the cache when it is matched, and how it gives everything back."""

from __future__ import annotations

from array import array

import attrs

from .cache import PrefixCache
from .holding import Holding
from .index import Run, stretches
from .lease import Lease
from .matching import Hit, PrefixMatch, find_hit
from .plan import Tier
from .table import BlockTable

__all__ = ["Pins"]


@attrs.define(eq=False)
class Pins:
    """Leases of requests: on the device for what is there, on the host for what is to be loaded."""

    cache: PrefixCache

    def pin(self, holding: Holding) -> None:
        """Match and pin, in one step: nothing can be evicted in between."""
        hit = Hit(0, 0, ())
        if holding.epoch == self.cache.epoch:
            layout = self.cache.layout
            limit = min((holding.sequence.num_tokens - 1) // layout.unit_tokens, holding.hit_limit)
            hit = find_hit(self.cache.index, holding.sequence, layout, limit, holding.hit_alignment)
        self._take_leases(holding, hit)
        unit = self.cache.layout.unit_tokens
        holding.published = holding.ready_stop = hit.device_stop
        holding.hit_stop = hit.stop
        holding.match = PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit)

    def _take_leases(self, holding: Holding, hit: Hit) -> None:
        if not hit.stop:
            return
        # Exactly what is used is pinned: a request must never be short of room because of what it pins itself.
        last = self.cache.cut(hit.run_at(hit.stop), hit.stop)
        if hit.stop > hit.device_stop:
            holding.leases[Tier.HOST] = self.lease(Tier.HOST, last)
            if self.cache.layout.windows:  # on the device more may lie than can be gone on with, and not in the host
                holding.reserve = self.lease(Tier.DEVICE, last)
        if hit.device_stop:
            on_device = next(run for run in last.path() if run.start < hit.device_stop)
            run = self.cache.cut(on_device, hit.device_stop)
            holding.leases[Tier.DEVICE] = self.lease(Tier.DEVICE, run)

    def lease(self, tier: Tier, run: Run) -> Lease:
        """Pin, in `tier`, what is needed for computing to go on at the end of `run`."""
        starts = [band.first_needed(run.stop * band.unit_tokens) for band in self.cache.layout.windows]
        return self.cache.lease(tier, run, starts)

    def unpin(self, holding: Holding) -> None:
        """Let go of the leases. Private blocks are another matter."""
        self.end_host_lease(holding)
        lease = holding.leases.pop(Tier.DEVICE, None)
        if lease is not None:
            self.cache.release(lease)

    def forget_match(self, holding: Holding) -> None:
        """Let go of the leases and of what was matched: it is matched again when its turn comes."""
        self.unpin(holding)
        holding.published = holding.ready_stop = holding.hit_stop = 0

    def end_host_lease(self, holding: Holding) -> None:
        """Pins for a load end when it settles, or when nothing loads."""
        lease = holding.leases.pop(Tier.HOST, None)
        if lease is not None:
            self.cache.release(lease)
        if holding.reserve is not None:
            self.cache.release(holding.reserve)
            holding.reserve = None

    def let_go(self, holding: Holding) -> None:
        """Give back everything the holding owns; synchronous, complete, whatever its state."""
        private = holding.private_blocks()
        holding.tables, holding.num_units, holding.load = (), 0, None
        self.cache.give(Tier.DEVICE, private)
        self.forget_match(holding)

    def start_tables(self, holding: Holding, num_units: int, blocks: array[int]) -> None:
        """The block tables: the ids of the device hit, as far as they are needed, then `blocks`."""
        holding.tables = tuple([BlockTable(band.width) for band in self.cache.layout.bands])
        stop = holding.published
        lease = holding.leases.get(Tier.DEVICE)
        for number, table in enumerate(holding.tables):
            if number and lease is not None:
                table.start = lease.starts[number - 1]
                table.ids = array("i", bytes(4 * table.start * table.width))
            table.ids.extend(self.ready_ids(holding, number, table.start, stop))
        holding.num_units = stop
        self.lengthen_tables(holding, num_units, blocks)

    def lengthen_tables(self, holding: Holding, num_units: int, blocks: array[int]) -> None:
        """Enter `blocks`, which were taken for units up to `num_units`."""
        added = num_units - holding.num_units
        if added > 0:
            for table, ids in zip(holding.tables, self.cache.layout.deal(blocks, added), strict=True):
                table.ids.extend(ids)
            holding.num_units = num_units

    def ready_ids(self, holding: Holding, band: int, start: int, stop: int) -> array[int]:
        """The ids of units `[start, stop)` of the path that `holding` leases on the device."""
        ids = array("i")
        for stretch in stretches(holding.device_run, start, stop):
            ids.extend(stretch.run.part(Tier.DEVICE, band).ids(stretch.start, stretch.stop))
        return ids

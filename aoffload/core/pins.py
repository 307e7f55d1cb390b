"""Pins: what a holding takes from the cache when it is matched, and how it gives everything back."""

from __future__ import annotations

from array import array

import attrs

from .cache import PrefixCache
from .holding import Holding
from .index import stretches
from .matching import Hit, PrefixMatch, find_hit
from .plan import Tier

__all__ = ["Pins"]


@attrs.define(eq=False)
class Pins:
    """Leases of requests: on the device for what is there, on the host for what is to be loaded."""

    cache: PrefixCache

    def pin(self, holding: Holding) -> None:
        """Match and pin, in one step: nothing can be evicted in between."""
        if holding.epoch != self.cache.epoch:
            hit = Hit(0, 0, ())
        else:
            limit = min((holding.sequence.num_tokens - 1) // self.cache.layout.unit_tokens, holding.hit_limit)
            found = find_hit(self.cache.index, holding.sequence, limit)
            hit = found.narrow(limit, holding.hit_alignment)
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
            holding.leases[Tier.HOST] = self.cache.lease(Tier.HOST, last)
        if hit.device_stop:
            on_device = next(run for run in last.path() if run.start < hit.device_stop)
            run = self.cache.cut(on_device, hit.device_stop)
            holding.leases[Tier.DEVICE] = self.cache.lease(Tier.DEVICE, run)

    def unpin(self, holding: Holding) -> None:
        """Let go of the leases. Private blocks are another matter."""
        for tier in tuple(holding.leases):
            self.cache.release(holding.leases.pop(tier))

    def forget_match(self, holding: Holding) -> None:
        """Let go of the leases and of what was matched: it is matched again when its turn comes."""
        self.unpin(holding)
        holding.published = holding.ready_stop = holding.hit_stop = 0

    def end_host_lease(self, holding: Holding) -> None:
        """Host pins end when the load settles, or when nothing loads."""
        lease = holding.leases.pop(Tier.HOST, None)
        if lease is not None:
            self.cache.release(lease)

    def let_go(self, holding: Holding) -> None:
        """Give back everything the holding owns; synchronous, complete, whatever its state."""
        private = holding.private_blocks(self.cache.layout.width)
        holding.table, holding.duplicates, holding.load = array("i"), [], None
        self.cache.give(Tier.DEVICE, private)
        self.forget_match(holding)

    def start_table(self, holding: Holding, blocks: array[int]) -> None:
        """The block table: the ids of the device hit, then `blocks`."""
        holding.table = self.ready_ids(holding, 0, holding.published)
        holding.table.extend(blocks)

    def ready_ids(self, holding: Holding, start: int, stop: int) -> array[int]:
        """The ids of units `[start, stop)` of the path that `holding` leases on the device."""
        width, ids = self.cache.layout.width, array("i")
        for stretch in stretches(holding.device_run, start, stop):
            first = stretch.run.start
            ids.extend(
                stretch.run.parts[Tier.DEVICE].blocks[(stretch.start - first) * width : (stretch.stop - first) * width]
            )
        return ids

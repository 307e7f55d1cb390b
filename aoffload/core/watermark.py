"""The eviction watermark: stores what the next allocations would evict, before they do.

    device order, oldest first:   [in flight | in the host | not yet | ...............]
                                   <-- free blocks + these: watermark -->

Stores in flight count, so such stores pin no more than about a watermark at a time. Blocks behind it may be evicted
meanwhile, and are lost then.
"""

from __future__ import annotations

import attrs

from .cache import PrefixCache
from .jobs import JobBook
from .presence import covered_stop
from .records import Job, Part, Run
from .stores import Stores

__all__ = ["EvictionWatermark"]


@attrs.define(eq=False)
class EvictionWatermark:
    cache: PrefixCache
    jobs: JobBook
    stores: Stores
    num_blocks: int
    _num_offers: int = 0
    _looked_at: tuple[int, ...] = ()

    def offer(self, run: Run, stop: int) -> None:
        """Mark the path of `run` up to unit `stop`, to be stored once it is about to be evicted."""
        for current in run.path():
            reached = min(stop, current.stop)
            if current.start < stop:
                if current.offered_stop >= reached:
                    break  # and so is all before it
                current.offered_stop = reached
                self._num_offers += 1

    def plan(self) -> list[Job]:
        """Store what was offered of the runs that are about to lose blocks, with all that is missing before it: the
        host holds nothing whose front it lacks."""
        if not self.num_blocks or self._nothing_changed():
            return []
        jobs: list[Job] = []
        for run in self._about_to_lose():  # listed first: pinning changes the order
            if run.parts:  # else it was merged with another one meanwhile: next time
                jobs += self._store(run)
        return jobs

    def _store(self, run: Run) -> list[Job]:
        stop = min(run.offered_stop, run.stop)
        pin = self.cache.lease(self.stores.source, run, [run.stop for _ in self.cache.layout.windows], is_use=False)
        jobs = self.stores.offer(None, run, run.start, stop, with_windows=_is_end(run))
        self.cache.release(pin)
        return jobs

    def _nothing_changed(self) -> bool:
        """True for most commits: free counts and offers unchanged."""
        source, room = self.cache.tiers[self.stores.source], self.cache.tiers[self.stores.destination].room
        counts = (source.pool.num_free, source.num_cached, source.num_evicted)
        now = (*counts, room, self.cache.epoch, self._num_offers)
        before, self._looked_at = self._looked_at, now
        return now == before

    def _about_to_lose(self) -> list[Run]:
        """Runs with blocks within the watermark that may be missing below, in eviction order."""
        source = self.cache.tiers[self.stores.source]
        left = self.num_blocks - source.pool.num_free - self.jobs.num_stored_now(self.stores.source)
        found: dict[Run, None] = {}
        for part in source.order:
            if left <= 0:
                break
            left -= len(part.blocks)
            if self._may_lack(part):
                found[part.run] = None
        return list(found)

    def _may_lack(self, part: Part) -> bool:
        run = part.run
        if run.offered_stop <= run.start:
            return False
        if part is run.parts[self.stores.source]:
            return covered_stop(run.parts[self.stores.destination]) < min(part.stop, run.offered_stop)
        return _is_end(run)


def _is_end(run: Run) -> bool:
    """Whether a later hit may end in `run`: no run is behind it, or only its front was offered. Only there a hit needs
    a window."""
    return not run.num_after or run.offered_stop < run.stop

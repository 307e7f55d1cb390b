"""The eviction watermark: what the next allocations would evict, stored before they do.

    device order, oldest first:   [in flight | in the host | not yet | ...............]
                                   <-- free blocks + these: watermark -->

What is in flight counts, so no more than about a watermark is pinned by such stores at a time; what is behind it can be
evicted meanwhile and is lost then.
"""

from __future__ import annotations

import attrs

from .cache import PrefixCache
from .jobs import JobBook
from .plan import Tier
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
        """Have the path of `run` stored up to unit `stop` once it is about to be lost."""
        for current in run.path():
            reached = min(stop, current.stop)
            if current.start < stop:
                if current.offered_stop >= reached:
                    break  # and with it all that lies before
                current.offered_stop = reached
                self._num_offers += 1

    def plan(self) -> list[Job]:
        """Store what was offered of the runs that are about to lose blocks. Whole prefixes: the host holds nothing
        whose front it lacks."""
        if not self.num_blocks or self._nothing_changed():
            return []
        jobs: list[Job] = []
        for run in self._about_to_lose():  # all of them first: pinning the first one changes the order
            if run.parts:  # else it was joined with another one meanwhile: next time
                jobs += self._store(run)
        return jobs

    def _store(self, run: Run) -> list[Job]:
        stop = min(run.offered_stop, run.stop)
        pin = self.cache.lease(Tier.DEVICE, run, [run.stop for _ in self.cache.layout.windows], is_use=False)
        jobs = self.stores.offer(None, run, run.start, stop, with_windows=_is_end(run))
        self.cache.release(pin)
        return jobs

    def _nothing_changed(self) -> bool:
        """Whether room is what it was, and nothing new was offered: so it is at most commits."""
        device, host = self.cache.tiers
        room = (device.pool.num_free, device.num_cached, device.num_evicted, host.room)
        now = (*room, self.cache.epoch, self._num_offers)
        before, self._looked_at = self._looked_at, now
        return now == before

    def _about_to_lose(self) -> list[Run]:
        """Runs with blocks in the watermark that the host may lack, the next to be evicted first."""
        device = self.cache.tiers[Tier.DEVICE]
        left = self.num_blocks - device.pool.num_free - self.jobs.num_stored_now()
        found: dict[Run, None] = {}
        for part in device.order:
            if left <= 0:
                break
            left -= len(part.blocks)
            if self._may_lack(part):
                found[part.run] = None
        return list(found)

    @staticmethod
    def _may_lack(part: Part) -> bool:
        run = part.run
        if run.offered_stop <= run.start:
            return False
        if part is run.parts[Tier.DEVICE]:
            return run.parts[Tier.HOST].covered_stop < min(part.stop, run.offered_stop)
        return _is_end(run)


def _is_end(run: Run) -> bool:
    """Whether a later prompt may end in `run`, as far as it was offered: where nothing goes on. Only there a hit needs
    a window."""
    return not run.num_after or run.offered_stop < run.stop

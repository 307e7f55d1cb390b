"""The eviction watermark: stores blocks in the tier below before the next allocations evict them.

    eviction order, oldest first:   [being stored | stored | not stored yet | ............]
                                     <-- free blocks + these: the watermark -->

The source blocks of stores under way count as part of the watermark, so these stores pin about `num_blocks` blocks at
most. An allocation of more blocks than the watermark may evict blocks before they are stored; these blocks are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .._kernel.cache import PrefixCache
from .._kernel.index import covered
from .._kernel.jobs import JobBook, Stores, left_of
from .._kernel.layout import Component
from .._kernel.pools import TierBlocks
from .._kernel.records import NO_LIMIT, Job, Part, Run


@dataclass(slots=True, eq=False)
class EvictionWatermark:
    cache: PrefixCache
    jobs: JobBook
    stores: Stores
    num_blocks: int
    """The watermark; 0: nothing is stored."""
    components: Sequence[Component]
    """The attention components whose blocks are stored."""
    step: int = 1
    """`nothing_changed` divides its counts by this, so that small changes cause no scan."""
    source: TierBlocks = field(init=False)
    there: TierBlocks = field(init=False)
    """The destination of the stores."""
    _num_offers: int = 0
    seen: tuple[object, ...] = ()
    """The state at the last scan. Empty forces a rescan."""

    def __post_init__(self) -> None:
        tiers = self.cache.tiers
        self.source, self.there = tiers[self.stores.source], tiers[self.stores.destination]

    def offer(self, run: Run, stop: int) -> None:
        """Mark the path of `run` up to unit `stop`, so that its blocks are stored once they are about to be evicted."""
        for current in run.path():
            reached = min(stop, current.stop)
            if current.start < stop:
                if current.offered_stop >= reached:
                    break  # the runs before it are marked already, too
                current.offered_stop = reached
                self._num_offers += 1

    def plan(self) -> list[Job]:
        """Store the offered units of the runs that are about to lose blocks, and all missing units before them, because
        the host holds no suffix without its prefix."""
        if self.nothing_changed():
            return []
        return self.store(self.about_to_lose(self.offered), self.offered)

    def store(
        self, runs: list[Run], wanted: Callable[[Run], int], most: int = NO_LIMIT, num_free: int = NO_LIMIT
    ) -> list[Job]:
        """Store the units of each of `runs` up to `wanted(run)`, at most `most` blocks. `runs` must be a list, and no
        iterator over the eviction order, because a store changes that order.

        The checkpoint of a run is stored first, because its KV is of no use without it. It is stored as a whole, also
        if it has more blocks than are left of `most`, but not if it has more than are left of `num_free`."""
        jobs: list[Job] = []
        for run in runs:
            if left_of(most, jobs) <= 0:
                break
            if run.parts:  # else it was merged into another run: the next call stores it
                stop, layout = wanted(run), self.cache.layout
                starts = layout.starts_of(layout.full, 0, run.stop)
                pin = self.cache.lease(self.stores.source, run, starts, is_use=False)
                if (recurrent := layout.recurrent) is not None and recurrent in self.components:
                    left = left_of(most, jobs)
                    if recurrent.width <= left_of(num_free, jobs):
                        left = max(left, recurrent.width)
                    jobs += self.stores.offer_checkpoints(None, run, run.start, stop, most=left)
                for component in self.components:
                    left = left_of(most, jobs)
                    if left > 0 and component is not layout.recurrent:
                        jobs += self.stores.offer(None, run, component, run.start, stop, most=left)
                self.cache.release(pin)
        return jobs

    @staticmethod
    def offered(run: Run) -> int:
        """The unit up to which `run` was offered."""
        return min(run.offered_stop, run.stop)

    def nothing_changed(self) -> bool:
        """Whether free counts and offers are the same as at the last scan. True for most commits."""
        before, self.seen = self.seen, self.state()
        return self.seen == before

    def state(self) -> tuple[object, ...]:
        """The values that `nothing_changed` compares."""
        source, there, step = self.source, self.there, self.step
        return (
            source.pool.num_free // step, source.num_cached // step, source.num_evicted // step,
            (there.pool.num_free + there.num_cached) // step, there.num_resets, self._num_offers, self.num_blocks,
        )  # fmt: skip

    def about_to_lose(self, wanted: Callable[[Run], int]) -> list[Run]:
        """The runs with blocks within the watermark that the tier below may lack, in eviction order."""
        source = self.source
        left = self.num_blocks - source.pool.num_free - self.jobs.num_stored_now(source.tier)
        return self.lacking(source.order, left, wanted)

    def lacking(self, parts: Iterable[Part], num_blocks: int, wanted: Callable[[Run], int]) -> list[Run]:
        """The runs of the first parts, up to `num_blocks` blocks, if the tier below may lack units of the run."""
        found: dict[Run, None] = {}
        for part in parts:
            if num_blocks <= 0:
                break
            num_blocks -= len(part.blocks)
            if self._may_lack(part, wanted):
                found[part.run] = None
        return list(found)

    def _may_lack(self, part: Part, wanted: Callable[[Run], int]) -> bool:
        if all(component.number != part.component for component in self.components):
            return False
        first, stop = covered(part.run.part(self.stores.destination, part.component))
        if first <= part.first and part.stop <= stop:
            return False
        end = min(part.stop, wanted(part.run))
        return end > part.first and not first <= part.first < end <= stop

"""One tier's blocks: its pool, its eviction order and its counts."""

from __future__ import annotations

from array import array
from typing import ClassVar, Protocol

import attrs

from .blocks import DevicePool
from .eviction import EvictionOrder
from .plan import Tier
from .records import Part

__all__ = ["BlockWatcher", "TierBlocks", "TierStatistics"]


class BlockWatcher(Protocol):
    """Who wants to know which blocks are cached. Told right after the change, in the middle of a call: it must neither
    raise nor call back. Blocks that go from one run to another stay cached, so nothing is said of them."""

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        """`part` held units `[first, stop)` of its run, and holds `[part.first, part.stop)` now."""

    def all_cleared(self, epoch: int) -> None:
        """Nothing is cached any more; what is from now on is of `epoch`."""


@attrs.frozen
class TierStatistics:
    """Blocks of one tier by what they are; the last four add up to the first."""

    num_blocks: int
    num_free: int
    num_cached: int
    """Findable and under no lease: the next to be evicted."""
    num_pinned: int
    """Under a lease of a request, a job or a step."""
    num_quarantined: int


@attrs.define(eq=False, repr=False)
class TierBlocks:
    """free + cached + pinned + quarantined = num_blocks."""

    is_outside: ClassVar[bool] = False
    """Whether the blocks are an engine's own: an end of copies, in which nothing is cached."""

    tier: Tier
    pool: DevicePool
    order: EvictionOrder
    num_cached: int = 0
    """Blocks in the order: what can be evicted, so that all-or-nothing is one comparison."""
    num_quarantined: int = 0
    num_evicted: int = 0
    num_changes: int = 0
    """How often what can be found here has changed, but for evictions: as long as it has not, no match that is pinned
    would come out otherwise."""
    watcher: BlockWatcher | None = None
    epoch: int = 0
    """That of the index. What is of another one is not findable."""

    def __repr__(self) -> str:
        return f"<TierBlocks {self.tier.name} {self.statistics()}>"

    def hold(self, block_ids: array[int]) -> None:
        """A job touches `block_ids` from now on. Blocks of our own are its by leases, or taken for it."""

    def let_go(self, block_ids: array[int]) -> None:
        """It has read them for the last time."""

    @property
    def room(self) -> int:
        """Blocks that can be had now."""
        return self.pool.num_free + self.num_cached

    @property
    def capacity(self) -> int:
        """Blocks that could be had if everybody let go."""
        return self.pool.num_blocks - self.num_quarantined

    def statistics(self) -> TierStatistics:
        free, cached, quarantined = self.pool.num_free, self.num_cached, self.num_quarantined
        pinned = self.pool.num_blocks - free - cached - quarantined
        return TierStatistics(self.pool.num_blocks, free, cached, pinned, quarantined)

    def make_evictable(self, part: Part) -> None:
        if part.last_use:
            self.order.add_back(part)
        else:
            self.order.add(part)
        self.num_cached += len(part.blocks)

    def make_pinned(self, part: Part) -> None:
        self.order.remove(part)
        self.num_cached -= len(part.blocks)

    def let_go_of(self, part: Part) -> None:
        """No lease protects `part` any more: what can be found of it is evictable, the rest is free."""
        if part.tombstones:
            self.pool.give(part.take_tombstones())
        if not part.blocks:
            return
        if part.run.epoch == self.epoch:
            self.make_evictable(part)
            return
        self.pool.give(part.clear())  # a reset has made it unfindable meanwhile

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        """`part`, which can be found, held units `[first, stop)` of its run until now."""
        self.num_changes += 1
        if self.watcher is not None:
            self.watcher.part_changed(part, first, stop)

    def all_cleared(self, epoch: int) -> None:
        """Nothing can be found any more: the index is of `epoch` from now on."""
        self.epoch = epoch
        self.num_changes += 1
        self.num_cached = 0

    def trim(self, part: Part, num_units: int) -> None:
        """Free the last `num_units` of an unpinned part: the tail first, so a prefix loses its tail before its head."""
        first, stop = part.first, part.stop
        freed = part.drop_behind(part.stop - num_units)
        if self.watcher is not None:
            self.watcher.part_changed(part, first, stop)
        self.num_cached -= len(freed)
        if not part.blocks:
            self.order.remove(part)
        self.pool.give(freed)

    def quarantine(self, block_ids: array[int]) -> None:
        self.num_quarantined += len(block_ids)

    def end_quarantine(self, block_ids: array[int]) -> None:
        self.num_quarantined -= len(block_ids)
        self.pool.give(block_ids)

"""One tier's blocks: its pool, its eviction order and its counts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from .eviction import EvictionOrder
from .hops import Tier
from .pools import DevicePool
from .records import Part
from .status import TierStatistics
from .watching import BlockWatcher

__all__ = ["DiskBlocks", "RemoteBlocks", "TierBlocks"]


@dataclass(slots=True, eq=False, repr=False)
class TierBlocks:
    """free + cached + pinned + quarantined = num_blocks."""

    tier: Tier
    pool: DevicePool
    order: EvictionOrder
    num_cached: int = 0
    """Evictable blocks, those in `order`, as a count: a check for room is one comparison."""
    num_quarantined: int = 0
    num_evicted: int = 0
    num_changes: int = 0
    """Counts changes of which blocks are findable, except evictions. While it stays the same, matching again would
    find what is pinned."""
    watcher: BlockWatcher | None = None
    epoch: int = 0
    """The epoch of the index. Runs of another epoch are not findable."""
    num_resets: int = 0
    """How often all that the tier held was made unfindable."""
    is_outside: bool = field(default=False, init=False)
    """Whether the blocks are somebody else's: copies read and write them, the index knows none of them."""

    def __repr__(self) -> str:
        return f"<TierBlocks {self.tier.name} {self.statistics()}>"

    def hold(self, block_ids: array[int]) -> None:
        """A job begins to use `block_ids`. Does nothing here, where leases protect them; see `EngineTier`."""

    def let_go(self, block_ids: array[int]) -> None:
        """The job has read `block_ids` for the last time. Does nothing here."""

    @property
    def room(self) -> int:
        """Blocks that can be taken: free and evictable ones."""
        return self.pool.num_free + self.num_cached

    @property
    def capacity(self) -> int:
        """Blocks that could be taken if nothing was in use: all but the quarantined."""
        return self.pool.num_blocks - self.num_quarantined

    def statistics(self) -> TierStatistics:
        free, cached, quarantined = self.pool.num_free, self.num_cached, self.num_quarantined
        pinned = self.pool.num_blocks - free - cached - quarantined
        return TierStatistics(self.pool.num_blocks, free, cached, pinned, quarantined)

    def make_pinned(self, part: Part) -> None:
        self.order.remove(part)
        self.num_cached -= len(part.blocks)

    def let_go_of(self, part: Part) -> None:
        """No lease protects `part` any more: make findable blocks evictable, free all others."""
        if part.tombstones:
            self.pool.give(part.take_tombstones())
        if not part.blocks:
            return
        if part.run.epoch != self.epoch:
            self.pool.give(part.clear())  # a reset has made it unfindable
            return
        if part.last_use:
            self.order.add_back(part)
        else:
            self.order.add(part)
        self.num_cached += len(part.blocks)

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        """Count and report the change: findable `part` held units `[first, stop)` of its run before."""
        self.num_changes += 1
        if self.watcher is not None:
            self.watcher.part_changed(part, first, stop)

    def all_cleared(self, epoch: int) -> None:
        """Nothing is findable any more: the new index has `epoch`."""
        self.epoch = epoch
        self.num_resets += 1
        self.num_changes += 1
        self.num_cached = 0

    def count_reset(self) -> None:
        """All that the tier held was withdrawn."""
        self.num_resets += 1
        self.num_changes += 1

    def taken_back(self, block_ids: array[int]) -> None:
        """What these blocks hold is wrong, and nothing finds it any more here. On a disk it would be found again after
        a restart: see `DiskBlocks`."""

    def freed_are_taken_back(self) -> None:
        """What free blocks held until now may be wrong, too."""

    def trim(self, part: Part, num_units: int) -> None:
        """Free the last `num_units` of an unpinned part: a prefix loses its tail before its head."""
        first, stop = part.first, part.stop
        freed = part.drop_behind(part.stop - num_units)
        if self.watcher is not None:
            self.watcher.part_changed(part, first, stop)
        self.num_cached -= len(freed)
        if not part.blocks:
            self.order.remove(part)
        self.pool.give(freed)

    def restore(self, part: Part, block_ids: array[int]) -> None:
        """Let the empty `part` hold `block_ids`, which are taken from the pool, for all units of its run. It is the
        next to be evicted."""
        held, run = (part.first, part.stop), part.run
        part.enter(run.start, run.stop, block_ids)
        if not part.num_references:
            oldest = self.order.oldest()
            if oldest is None:
                self.order.add(part)
            else:
                self.order.add_newer(part, oldest)
                self.order.remove(oldest)
                self.order.add_newer(oldest, part)
            self.num_cached += len(block_ids)
        self.part_changed(part, *held)

    def quarantine(self, block_ids: array[int]) -> None:
        self.num_quarantined += len(block_ids)

    def end_quarantine(self, block_ids: array[int]) -> None:
        self.num_quarantined -= len(block_ids)
        self.pool.give(block_ids)


@dataclass(slots=True, eq=False, repr=False)
class DiskBlocks(TierBlocks):
    """The blocks of a tier that outlives the process."""

    used: set[int] = field(default_factory=set, kw_only=True)
    """The free blocks that were in use since the last reset: a restart may find what they held."""
    forgotten: array[int] = field(default_factory=lambda: array("i"), init=False)
    """Blocks whose contents were taken back, until somebody erases what a restart would know of them."""

    def taken_back(self, block_ids: array[int]) -> None:
        self.forgotten.extend(block_ids)

    def freed_are_taken_back(self) -> None:
        """Nobody knows any more what they hold: that of the wrong one is erased with that of all others."""
        self.forgotten.extend(sorted(self.used))
        self.used.clear()

    def end_quarantine(self, block_ids: array[int]) -> None:
        """What a copy has left there that was given up may have been taken back meanwhile."""
        TierBlocks.end_quarantine(self, block_ids)
        self.forgotten.extend(block_ids)

    def all_cleared(self, epoch: int) -> None:
        TierBlocks.all_cleared(self, epoch)
        self.used.clear()  # no restart finds anything of before

    def count_reset(self) -> None:
        TierBlocks.count_reset(self)
        self.used.clear()

    def take_forgotten(self) -> array[int]:
        """Return and clear `forgotten`."""
        forgotten, self.forgotten = self.forgotten, array("i")
        return forgotten


@dataclass(slots=True, eq=False, repr=False)
class RemoteBlocks(TierBlocks):
    """A remote store, as an end of copies: it has no blocks here, and nothing in it can be held or quarantined."""

    is_outside: bool = field(default=True, init=False)

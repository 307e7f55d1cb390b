"""One tier's blocks: its pool, its eviction order and its counts."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, ClassVar, Protocol

import attrs

from .blocks import DevicePool
from .eviction import EvictionOrder
from .index import Part
from .plan import Tier

if TYPE_CHECKING:
    from .holding import Holding

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

    is_lent: ClassVar[bool] = False
    """Whether the blocks are an engine's: see `LentTier`, which says of each method what it does then."""

    tier: Tier
    pool: DevicePool
    order: EvictionOrder
    num_cached: int = 0
    """Blocks in the order: what can be evicted, so that all-or-nothing is one comparison."""
    num_quarantined: int = 0
    num_evicted: int = 0
    watcher: BlockWatcher | None = None

    def __repr__(self) -> str:
        return f"<TierBlocks {self.tier.name} {self.statistics()}>"

    def require_own(self, call: str) -> None:
        """Refuse `call` where there are no blocks to be had."""

    def keep_record(self, holding: Holding) -> None:
        """`holding` begins again: what it had computed until now stays known of blocks that were lent to it."""

    def share(self, block_ids: array[int]) -> array[int]:
        """A handle more on each of `block_ids`, for another hand; of blocks of our own there is only one, so none."""
        return array("i")

    def set_aside(self, block_ids: array[int]) -> array[int]:
        """Give up blocks that may be needed again; those that are kept for it."""
        if block_ids:
            self.pool.give(block_ids)
        return array("i")

    def leave_front(self, part: Part, at: int) -> None:
        """What lies before unit `at` of `part` is needed no more: it is cached from now on."""

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

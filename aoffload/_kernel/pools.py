"""Pools and tiers: which block ids of a tier are free, which blocks may be evicted, and which step used a block last.

A pool hands out block ids: `FreeList` for the device (the warmest block first), `ExtentPool` for the host (few
contiguous extents, so that one call copies many blocks). `TierBlocks` adds the eviction order and the counts of a tier:

    free + cached (evictable) + pinned + quarantined = num_blocks

**Last uses.** A forward may still run on the device when the step that holds its blocks has ended on the host. A load
must not write to a block before that forward is over. Steps are numbered in the order in which they end. The runtime
records a fence at the end of each step. Waiting for step `n` means waiting for the fences of all steps up to `n`.

    a request gives up a block    the block remembers the number of the request's last step
    a load takes blocks           it waits for the steps up to the largest number of its blocks

    step 7 ends, its fence is recorded ----+
    request in step 7 releases block 3     |   block 3: last use 7
    a load is given block 3                |   its copy waits for the fences up to 7, not for step 8, which is running

A request that was in no step, or was forked, may have computed outside of its steps. Its blocks get the number of the
next step to end, because that step's fence is later than all compute so far. Until that fence is recorded, the load
waits for all compute so far. After one commit that no step covers, every later load waits for all compute so far.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .._common.tiers import Tier
from .index import Stretch
from .layout import Component
from .plans import TierStatistics
from .protocols import BlockWatcher, DevicePool, EvictionOrder
from .records import MIN_FOR_NUMPY, LedgerRequest, Part
from .states import ALLOCATED, RUNNING


class FreeList:
    """Device blocks `[1, num_rows)`, last in, first out: a block that was just used is the warmest. Row 0 is null.

    Ids given back together are taken again in the same order, so that neighbours stay neighbours."""

    def __init__(self, num_rows: int) -> None:
        self.num_blocks = self.num_free = num_rows - 1
        self._free = array("i", range(1, num_rows))

    def __repr__(self) -> str:
        return f"<FreeList {self.num_free}/{self.num_blocks} free>"

    def take(self, num_blocks: int) -> array[int]:
        keep = self.num_free - num_blocks
        assert keep >= 0, "taken more than is free"
        taken = self._free[keep:]
        del self._free[keep:]
        self.num_free = keep
        return taken

    def give(self, block_ids: array[int]) -> None:
        self._free.extend(block_ids)
        self.num_free += len(block_ids)

    def free_ids(self) -> Iterable[int]:
        return iter(self._free)


MAX_TRIES = 4
"""How many extents of the wanted size class are tried. Extents of one class differ in size, so some are too small.
After this many tries, an extent of a larger class is taken."""


class ExtentPool:
    """Host blocks `[0, num_blocks)`, handed out in few contiguous extents: one copy call moves one extent.

    Adjacent free extents are merged. Extents are found by size class (the bit length of their size).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = 0
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._classes: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]
        if num_blocks:
            self._add(0, num_blocks)

    def __repr__(self) -> str:
        return f"<ExtentPool {self.num_free}/{self.num_blocks} free in {len(self._stop_of)} extents>"

    def take(self, num_blocks: int) -> array[int]:
        assert 0 <= num_blocks <= self.num_free, "taken more than is free"
        taken, wanted = array("i"), num_blocks
        while wanted:
            start = self._find(wanted)
            stop = self._remove(start)
            if stop - start > wanted:
                self._add(start + wanted, stop)
                stop = start + wanted
            wanted -= stop - start
            ids = id_range(start, stop)
            if taken:
                taken.extend(ids)
            else:
                taken = ids
        return taken

    def give(self, block_ids: array[int]) -> None:
        for start, stop in extents(block_ids):
            before = self._start_of.get(start)
            if before is not None:
                self._remove(before)
                start = before
            if stop in self._stop_of:
                stop = self._remove(stop)
            self._add(start, stop)

    def free_ids(self) -> Iterable[int]:
        for start, stop in self._stop_of.items():
            yield from range(start, stop)

    def _find(self, wanted: int) -> int:
        """The start of a free extent of at least `wanted` blocks; otherwise of one in the largest size class."""
        classes, number = self._classes, wanted.bit_length()
        exact = classes[number]
        for num_tries, start in enumerate(exact):
            if num_tries == MAX_TRIES:
                break
            if self._stop_of[start] - start >= wanted:
                return start
        for larger in range(number + 1, len(classes)):
            if classes[larger]:
                return next(iter(classes[larger]))
        for start in exact:  # no larger class has one: search its class before handing out several extents
            if self._stop_of[start] - start >= wanted:
                return start
        return next(next(iter(found)) for found in reversed(self._classes) if found)

    def _add(self, start: int, stop: int) -> None:
        self._stop_of[start] = stop
        self._start_of[stop] = start
        self._classes[(stop - start).bit_length()][start] = None
        self.num_free += stop - start

    def _remove(self, start: int) -> int:
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        del self._classes[(stop - start).bit_length()][start]
        self.num_free -= stop - start
        return stop


def id_range(start: int, stop: int) -> array[int]:
    """The ids `[start, stop)`."""
    if stop - start < MIN_FOR_NUMPY:
        return array("i", range(start, stop))
    return array("i", np.arange(start, stop, dtype=np.int32).tobytes())


def are_neighbours(block_ids: array[int]) -> bool:
    """Whether the ids are consecutive and ascending."""
    start, stop = block_ids[0], block_ids[-1] + 1
    return stop - start == len(block_ids) and block_ids == id_range(start, stop)


def extents(block_ids: array[int]) -> Sequence[tuple[int, int]]:
    """`block_ids` as half-open ranges of consecutive ids, in their order."""
    if not block_ids:
        return ()
    found: list[tuple[int, int]] = []
    if len(block_ids) < MIN_FOR_NUMPY:
        start = stop = block_ids[0]
        if are_neighbours(block_ids):
            return ((start, block_ids[-1] + 1),)
        for block_id in block_ids:
            if block_id != stop:
                found.append((start, stop))
                start = block_id
            stop = block_id + 1
        found.append((start, stop))
        return found
    seen = np.frombuffer(block_ids, np.int32)
    first = 0
    for last in (*np.flatnonzero(seen[1:] - seen[:-1] != 1).tolist(), len(block_ids) - 1):
        found.append((block_ids[first], block_ids[last] + 1))
        first = last + 1
    return found


@dataclass(slots=True, eq=False, repr=False)
class TierBlocks:
    """The blocks of one tier: the pool of the free ones, the eviction order of the cached ones, and their counts.

    free + cached + pinned + quarantined = num_blocks
    """

    tier: Tier
    pool: DevicePool
    order: EvictionOrder
    num_cached: int = 0
    """Number of evictable blocks, those of the parts in `order`."""
    num_quarantined: int = 0
    num_evicted: int = 0
    num_changes: int = 0
    """Counts changes of the set of findable blocks, except evictions. While it stays the same, a new match would find
    nothing more than the blocks that the present match pins."""
    watcher: BlockWatcher | None = None
    epoch: int = 0
    """The epoch of the index. Runs of another epoch are not findable."""
    num_resets: int = 0
    """How often all that the tier held was made unfindable."""
    is_outside: bool = field(default=False, kw_only=True)
    """Whether the blocks belong to others, such as an engine or a store: copies read and write them, and the index
    knows none of them. Leases protect no such block."""
    is_absent: bool = field(default=False, kw_only=True)
    """Whether this only keeps the place of a tier that is not there: see `absent_tier`."""
    timeouts_s: tuple[float, float] | None = field(default=None, kw_only=True)
    """Seconds for a load and for a store, in place of those that the configuration sets."""

    def __repr__(self) -> str:
        return f"<TierBlocks {self.tier.name} {self.statistics()}>"

    def payload_of(self, pieces: list[Stretch], component: Component) -> object:
        """The payload of a plan that copies `pieces` of `component` to this tier; None if its transport needs none. A
        tier whose transport needs more than block ids overrides this."""
        return None

    def hold(self, block_ids: array[int]) -> None:
        """A job begins to use `block_ids`, of a tier that `is_outside`. `EngineTier` tells its engine; in other tiers,
        leases protect the blocks, and this does nothing."""

    def unhold(self, block_ids: array[int]) -> None:
        """The opposite of `hold`: the copy of the job does not touch `block_ids` any more."""

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free and evictable ones."""
        return self.pool.num_free + self.num_cached

    @property
    def capacity(self) -> int:
        """Blocks that could be taken if none were in use: all but the quarantined ones."""
        return self.pool.num_blocks - self.num_quarantined

    def statistics(self) -> TierStatistics:
        free, cached, quarantined = self.pool.num_free, self.num_cached, self.num_quarantined
        pinned = self.pool.num_blocks - free - cached - quarantined
        return TierStatistics(self.pool.num_blocks, free, cached, pinned, quarantined)

    def make_pinned(self, part: Part) -> None:
        """The first reference on `part`: it is not evictable any more."""
        self.order.remove(part)
        self.num_cached -= len(part.blocks)

    def make_unpinned(self, part: Part) -> None:
        """The last reference on `part` has ended: make findable blocks evictable, and free all others."""
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
        """Count and report a change of `part`, which held units `[first, stop)` of its run before."""
        self.num_changes += 1
        if self.watcher is not None:
            self.watcher.part_changed(part, first, stop)

    def all_cleared(self, epoch: int) -> None:
        """The whole cache was reset: the new index, of `epoch`, is empty."""
        self.epoch = epoch
        self.num_cached = 0
        self.count_reset()

    def count_reset(self) -> None:
        """This tier alone was reset."""
        self.num_resets += 1
        self.num_changes += 1

    def invalidated(self, block_ids: array[int]) -> None:
        """The contents of these blocks are wrong, and were withdrawn from the index. Does nothing here. A tier that
        outlives the process overrides this, because a restart would find the blocks again."""

    def free_blocks_invalidated(self) -> None:
        """The contents that free blocks had may be wrong, too. Does nothing here; see `invalidated`."""

    def trim(self, part: Part, num_units: int) -> None:
        """Free the blocks of the last `num_units` of an unpinned part: a prefix loses its tail before its head."""
        first, stop = part.first, part.stop
        freed = part.truncate(part.stop - num_units)
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


_COMPUTING = (ALLOCATED, RUNNING)


def absent_tier(tier: Tier) -> TierBlocks:
    """A placeholder for `tier`, which is not configured: the tiers after it in the list keep their numbers."""
    return TierBlocks(tier, ExtentPool(0), LeastRecentlyUsed(), is_outside=True, is_absent=True)


class LastUses:
    """For each device block, the number of the last step that used it."""

    __slots__ = ("_of_block", "are_covered", "num_ended")

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: with the null block; 0 if an engine owns the blocks, whose uses are not known."""
        self._of_block = array("q", [1]) * num_blocks
        """Number of the last step that used each block. It is 1 at first, because earlier work counts as step 1."""
        self.num_ended = 0
        """Steps that have ended."""
        self.are_covered = num_blocks > 0
        """Whether every commit so far was of tokens that a step computed. False, too, if an engine owns the blocks."""

    def step_ended(self) -> int:
        """Returns the number of the step that ends now."""
        self.num_ended += 1
        return self.num_ended

    def gave_up(self, request: LedgerRequest, block_ids: array[int]) -> None:
        """Note the last step of `request` for `block_ids`, which leave its tables. They may contain null blocks."""
        if not self.are_covered or not (request.last_step or request.state in _COMPUTING):
            return  # `request` has computed nothing, so the blocks keep their numbers
        number, of_block = request.last_step or self.num_ended + 1, self._of_block
        if len(block_ids) < MIN_FOR_NUMPY:
            for block_id in block_ids:
                if of_block[block_id] < number:
                    of_block[block_id] = number
        else:
            known, at = np.frombuffer(of_block, np.int64), np.frombuffer(block_ids, np.int32)
            known[at] = np.maximum(known[at], number)

    def latest(self, block_ids: array[int]) -> int:
        """The number of the last step that may have touched these blocks; 0 if it is unknown or that step has not
        ended."""
        if not self.are_covered or not block_ids:
            return 0
        if len(block_ids) < MIN_FOR_NUMPY:
            number = max([self._of_block[block_id] for block_id in block_ids])
        else:
            number = int(np.frombuffer(self._of_block, np.int64)[np.frombuffer(block_ids, np.int32)].max())
        return number if number <= self.num_ended else 0


class LeastRecentlyUsed:
    """The part that was released first is evicted first. A linked list through the parts, by `last_use`."""

    def __init__(self) -> None:
        self.first: Part | None = None
        """The oldest part."""
        self._newest: Part | None = None
        self._num_uses = 0

    def add(self, part: Part) -> None:
        self._num_uses += 1
        part.last_use = self._num_uses
        newest, self._newest = self._newest, part
        part.older = newest
        if newest is None:
            self.first = part
        else:
            newest.newer = part

    def add_newer(self, part: Part, than: Part) -> None:
        part.last_use = than.last_use
        self._link(part, than)

    def add_back(self, part: Part) -> None:
        """Searches from both ends: parts about to be evicted are near one, hot parts near the other."""
        old, new = self.first, self._newest
        while old is not None and new is not None:
            if old.last_use > part.last_use:
                return self._link(part, old.older)
            if new.last_use <= part.last_use:
                return self._link(part, new)
            old, new = old.newer, new.older
        return self._link(part, new)

    def _link(self, part: Part, older: Part | None) -> None:
        """Link `part` right after `older`; as the oldest if that is None."""
        newer = self.first if older is None else older.newer
        part.older, part.newer = older, newer
        if older is None:
            self.first = part
        else:
            older.newer = part
        if newer is None:
            self._newest = part
        else:
            newer.older = part

    def remove(self, part: Part) -> None:
        older, newer = part.older, part.newer
        assert older is not None or self.first is part, "not in the order"
        if older is None:
            self.first = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        part.older = part.newer = None

    def oldest(self) -> Part | None:
        return self.first

    def parts(self) -> Iterable[Part]:
        return self

    def key(self, part: Part) -> int:
        """Compares parts of several lists whose uses are numbered together."""
        return part.last_use

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        return older.newer is newer

    def __iter__(self) -> Iterator[Part]:
        part = self.first
        while part is not None:
            yield part
            part = part.newer

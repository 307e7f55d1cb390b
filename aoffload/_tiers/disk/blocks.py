"""The blocks of the disk in the ledger: free and used slots, and the slots whose blocks a restart may find.

A slot outlives the process. For each slot the disk keeps a record, made from the label of its block, so that a restart
finds the block again. So the records of invalidated blocks have to be erased, even if their slots are free.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..._kernel.index import Stretch
from ..._kernel.layout import Component
from ..._kernel.pools import ExtentPool, TierBlocks, extents
from ..._kernel.records import Part
from ..._kernel.tokens import hash_run
from .plans import BlockLabel, DiskPayload


class SlotPool(ExtentPool):
    """The slots of a disk. A restart may find the old block of a free slot, until another block is stored there."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.used: set[int] = set()
        """The free slots that this process has used before."""
        self._starts: list[int] = []
        """Cache of `_extent_with`: the starts of the free extents at its last sort."""

    def take(self, num_blocks: int) -> array[int]:
        taken = super().take(num_blocks)
        self.used.difference_update(taken)
        return taken

    def give(self, block_ids: array[int]) -> None:
        super().give(block_ids)
        self.used.update(block_ids)

    def are_free(self, block_ids: Sequence[int]) -> bool:
        return all(
            self._stop_of.get(self._extent_with(start), 0) >= stop for start, stop in extents(array("i", block_ids))
        )

    def take_ids(self, block_ids: array[int]) -> None:
        """Take exactly these ids. The caller has checked that they are free."""
        for first, last in extents(block_ids):
            start = self._extent_with(first)
            stop = self._remove(start)
            if start < first:
                self._add(start, first)
            else:
                del self._starts[bisect_left(self._starts, start)]
            if last < stop:
                self._add(last, stop)
                insort(self._starts, last)
        self.used.difference_update(block_ids)

    def _extent_with(self, block_id: int) -> int:
        """The start of the free extent that holds `block_id`; -1 if it is not free."""
        for starts in (self._starts, None):
            if starts is None:  # not in the cache: extents have changed since, or the block is not free
                self._starts = starts = sorted(self._stop_of)
            at = bisect_right(starts, block_id) - 1
            if at >= 0 and self._stop_of.get(starts[at], 0) > block_id:
                return starts[at]
        return -1


@dataclass(slots=True, eq=False, repr=False)
class DiskBlocks(TierBlocks):
    """The blocks of a disk, which outlive the process."""

    used: set[int] = field(default_factory=set, kw_only=True)
    """`SlotPool.used`: the free blocks whose old contents a restart may find. A reset clears it."""
    forgotten: array[int] = field(default_factory=lambda: array("i"), init=False)
    """Blocks whose contents were invalidated, until the caller calls `take_forgotten` and erases their records."""

    def payload_of(self, pieces: list[Stretch], component: Component) -> DiskPayload:
        return DiskPayload(labels_of(pieces, component), self.num_resets)

    def invalidated(self, block_ids: array[int]) -> None:
        self.forgotten.extend(block_ids)

    def free_blocks_invalidated(self) -> None:
        """Erase the records of all free slots that were used, because the ledger does not know their contents any
        more."""
        self.forgotten.extend(sorted(self.used))
        self.used.clear()

    def end_quarantine(self, block_ids: array[int]) -> None:
        """Erases the records, because the copy to these blocks was given up, and its KV may have been invalidated
        meanwhile."""
        TierBlocks.end_quarantine(self, block_ids)
        self.forgotten.extend(block_ids)

    def count_reset(self) -> None:
        TierBlocks.count_reset(self)
        self.used.clear()  # no restart finds what these held

    def take_forgotten(self) -> array[int]:
        """Return and clear `forgotten`."""
        forgotten, self.forgotten = self.forgotten, array("i")
        return forgotten

    def restore(self, part: Part, block_ids: array[int]) -> None:
        """Let the empty `part` hold `block_ids`, which are taken from the pool, for all units of its run. An unpinned
        part becomes the first in the eviction order, because this process has not used it yet."""
        held, run = (part.first, part.stop), part.run
        part.enter(run.start, run.stop, block_ids)
        if not part.num_references:
            oldest = self.order.oldest()
            if oldest is None:
                self.order.add(part)
            else:
                self.order.add_newer(part, oldest)  # the order cannot add before the oldest, so swap both
                self.order.remove(oldest)
                self.order.add_newer(oldest, part)
            self.num_cached += len(block_ids)
        self.part_changed(part, *held)


def labels_of(pieces: list[Stretch], component: Component) -> tuple[BlockLabel | None, ...]:
    """A label for each block of `component` in `pieces`, in prefix order. From the labels, a restart proves which KV
    the blocks hold.

    From the first unit on that a key span touches, the labels are None, because the tokens do not identify the content
    of the span, such as an image."""
    if any(run.spans for run in pieces[0][0].path()):
        return (None,) * (sum(stop - start for _, start, stop in pieces) * component.width)
    found: list[BlockLabel | None] = []
    for stretch in pieces:
        if stretch[0].spans:
            left = sum(stop - start for _, start, stop in pieces) * component.width - len(found)
            return (*found, *(None,) * left)
        found += _labels(stretch, component)
    return tuple(found)


def _labels(stretch: Stretch, component: Component) -> Iterator[BlockLabel]:
    run, start, stop = stretch
    unit_bytes = len(run.tokens) // (run.stop - run.start)
    first, last = (start - run.start) * unit_bytes, (stop - run.start) * unit_bytes
    tokens, root = bytes(run.tokens[first:last]), run.root.digest
    hasher = hash_run(run.hash_before, run.tokens[:first], (), unit_bytes)
    before = hasher.digest() if start else b""
    for number, position in enumerate(range(start, stop)):
        of_unit = tokens[number * unit_bytes : (number + 1) * unit_bytes]
        hasher.update(of_unit)
        digest = hasher.digest()
        for place in range(component.width):
            yield BlockLabel(component.number, place, position, root, digest, before, of_unit)
        before = digest

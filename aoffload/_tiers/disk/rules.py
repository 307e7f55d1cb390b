"""The rules of the disk tier: which runs a restart restores. `_tiers/lower/rules.py` decides which blocks are stored.

Runs that an earlier process has left on disk enter the index before anything else is stored there. Each run names the
digest of the prefix that it follows, so a prefix is restored before the runs after it. This process has not used the
restored runs yet. So the disk evicts them before all others, and the run that was restored last first: a suffix is
evicted before its prefix.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..._common.arguments import as_tuple, check_int, check_type, shown
from ..._common.prefix import TOKEN_BYTES, Hasher, Prefix, Root
from ..._common.tiers import Tier
from ..._kernel.cache import PrefixCache
from ..._kernel.index import Stretch
from ..._kernel.layout import Component
from ..._kernel.pools import ExtentPool, TierBlocks, extents
from ..._kernel.records import Part, Run
from ..._kernel.tokens import TokenSequence, hash_run
from ...errors import InvalidArgument
from .plans import BlockLabel, DiskPayload, RestoredRun, TakesIds

# -- blocks ----------------------------------------------------------------------------------------------------------
#
# The blocks of the disk in the ledger: free and used slots, and the slots whose blocks a restart may find.
#
# A slot outlives the process. For each slot the disk keeps a record, made from the label of its block, so that a
# restart finds the block again. So the records of invalidated blocks have to be erased, even if their slots are free.


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


# -- rules -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Restores:
    cache: PrefixCache
    disk: DiskBlocks
    pool: TakesIds
    """The pool of `disk`."""
    _ends: dict[bytes, Run] = field(default_factory=dict)
    """By digest of a prefix: the run that ended there when it was restored."""
    _bare: dict[bytes, RestoredRun] = field(default_factory=dict)
    """By digest of a prefix: a run without slots that ends there. It enters the index with the first run after it."""

    def restore(self, found: RestoredRun) -> int:
        """Restore `found`. Returns the number of its slots that are in use now: 0 if the disk does not hold the prefix
        before it, or if its slots are not free."""
        if self.cache.layout.full.width and not found.slots[0]:
            return 0  # no hit could end in it or after it
        if not any(found.slots):
            self._bare[found.digest] = found
            return 0
        if not self.pool.are_free([block_id for slots in found.slots for block_id in slots]):
            return 0
        taken, before = 0, None
        if not found.start:
            taken = self._enter(found, None, Root.of_digest(found.root))
        elif (before := self._end_of(found.before, found.start)) is not None:
            taken = self._enter(found, before, before.root)
        if not taken and before is not None:
            self.cache.tidy(before)  # it may have entered the index for this run alone
        return taken

    def _end_of(self, digest: bytes, stop: int) -> Run | None:
        """The run that has the last unit before `stop` of the prefix with `digest`, if the disk holds that whole
        prefix."""
        run = self._known_end(digest, stop)
        bare = self._bare.get(digest)
        if run is not None or bare is None:
            return run
        before = self._end_of(bare.before, bare.start) if bare.start else None
        if before is not None or not bare.start:
            self._enter(bare, before, Root.of_digest(bare.root) if before is None else before.root)
        return self._known_end(digest, stop)

    def _known_end(self, digest: bytes, stop: int) -> Run | None:
        run = self._ends.get(digest)
        # The run may have been merged into the run after it, and that run may have been split again.
        while run is not None and (not run.parts or run.start >= stop):
            run = run.before
        if run is None or run.stop < stop or run.epoch != self.cache.epoch:
            return None
        part = run.parts[Tier.DISK]
        is_there = not part.width or part.stop >= stop
        return run if is_there and _hash_up_to(run, stop).digest() == digest else None

    def _enter(self, found: RestoredRun, before: Run | None, root: Root) -> int:
        """Insert the tokens of `found` after `before`, and let the disk tier hold its slots there. Returns the number
        of these slots."""
        cache, start = self.cache, found.start
        hasher = root.hasher.copy() if before is None else _hash_up_to(before, start)
        hasher.update(found.tokens)
        if root.digest != found.root or hasher.digest() != found.digest:
            return 0
        known = b"".join([run.tokens for run in before.whole_path()]) if before is not None else b""
        known = known[: start * cache.layout.unit_tokens * TOKEN_BYTES]
        sequence = TokenSequence(Prefix(root, known + found.tokens), cache.layout.unit_tokens)
        run = None if before is None else cache.cut(before, start)
        taken = 0
        while start < found.stop:
            following = cache.index.find(sequence, run, start)
            if following is None:
                run = cache.index.insert(sequence, run, start, sequence.run_stop(start, found.stop))
            else:
                run = cache.cut(following, sequence.common_stop(following, found.stop))
            taken += sum([self._fill(run, number, found) for number, slots in enumerate(found.slots) if slots])
            if run.parts[Tier.DISK].width and run.parts[Tier.DISK].stop < run.stop:
                return taken  # a unit was found corrupt meanwhile, so no fetch could bring the units after it
            start = run.stop
        assert run is not None
        self._ends[found.digest] = run
        return taken

    def _fill(self, run: Run, number: int, found: RestoredRun) -> int:
        """Let `run` hold its slots in one component, unless the disk holds other blocks of the run or a store will
        bring some. Returns the number of these slots."""
        part, width = run.part(Tier.DISK, number), self.cache.layout.components[number].width
        if part.blocks or part.incoming is not None:
            return 0
        ids = found.slots[number][(run.start - found.start) * width : (run.stop - found.start) * width]
        self.pool.take_ids(ids)
        self.disk.restore(part, ids)
        return len(ids)


def _hash_up_to(run: Run, stop: int) -> Hasher:
    """A new running hash of the prefix before unit `stop` of `run`. No key span touches that prefix."""
    unit_bytes = len(run.tokens) // (run.stop - run.start)
    return hash_run(run.hash_before, run.tokens[: (stop - run.start) * unit_bytes], (), unit_bytes)


def check_restored(found: object, cache: PrefixCache) -> RestoredRun:
    """`found`, if an earlier process can have left it on this disk; otherwise `InvalidArgument`."""
    run = check_type("run", found, RestoredRun)
    check_int("run.start", run.start, 0)
    check_int("run.stop", run.stop, run.start + 1)
    num_units, components = run.stop - run.start, cache.layout.components
    for name in ("root", "before", "digest", "tokens"):
        if not isinstance(getattr(run, name), bytes):
            raise InvalidArgument(f"run.{name}", f"must be bytes, got {shown(getattr(run, name))}")
    if len(run.tokens) != num_units * cache.layout.unit_tokens * TOKEN_BYTES:
        raise InvalidArgument("run.tokens", f"must be those of {num_units} units, has {len(run.tokens)} bytes")
    slots = as_tuple("run.slots", run.slots, "arrays")
    if len(slots) != len(components):
        raise InvalidArgument(
            "run.slots", f"must have an array for each component, {len(components)}, has {len(slots)}"
        )
    seen: set[int] = set()
    for ids, component in zip(slots, components, strict=True):
        if not isinstance(ids, array) or ids.typecode != "i" or len(ids) not in (0, num_units * component.width):
            raise InvalidArgument("run.slots", f"must be int arrays for {num_units} units, got {shown(ids)}")
        if len(seen | set(ids)) != len(seen) + len(ids):
            raise InvalidArgument("run.slots", "names a slot twice")
        seen.update(ids)
    if seen and not 0 <= min(seen) <= max(seen) < cache.tiers[Tier.DISK].pool.num_blocks:
        raise InvalidArgument("run.slots", "names a slot that the disk does not have")
    return run

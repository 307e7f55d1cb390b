"""The rules of the disk tier: what is stored there, and what a restart brings back.

**Stores** (`DiskStores`). Blocks that the host is about to evict are stored, then blocks that were requested twice, and
at the end all others. A prefix is stored whole: the disk holds no suffix whose prefix it lacks. The caller decides how
many blocks may be written, and when.

**Restores** (`Restores`). Runs that an earlier process has left on disk enter the index before anything else is stored
there. Each run names the digest of the prefix that it follows, so a prefix is restored before the runs after it. This
process has used none of them. So each restored run is the next that the disk evicts, before those restored earlier: a
prefix loses its tail before its head.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from ..._arguments import as_tuple, check_int, check_type, shown
from ..._extensions.store_policies import RequestCounts
from ..._extensions.watermark import EvictionWatermark
from ..._kernel.cache import PrefixCache
from ..._kernel.index import covered_stop
from ..._kernel.jobs import left_of
from ..._kernel.pools import TierBlocks
from ..._kernel.prefix import TOKEN_BYTES, Hasher, Prefix, Root
from ..._kernel.records import NO_LIMIT, Job, Part, Run
from ..._kernel.states import Tier
from ..._kernel.tokens import TokenSequence, hash_run
from ...errors import InvalidArgument
from .blocks import DiskBlocks
from .plans import RestoredRun, TakesIds

STEPS = 16
"""The watermark has this many steps: the host is scanned again once it has used one step of free blocks."""
MAX_SCANNED = 64
"""Maximum parts that one call scans for blocks that were requested twice."""


@dataclass(slots=True, eq=False)
class DiskStores:
    watermark: EvictionWatermark
    counts: RequestCounts
    _came_to: tuple[object, ...] = ()
    """The situation at the last scan of what the host is about to evict."""
    _turns: dict[Run, int] = field(default_factory=dict)
    """Runs that the disk lacked at that scan, each with the number of blocks that may still be stored for it. Empty
    once each run has had its turn. Turns end the writes to a disk that is smaller than the watermark: without them,
    each store would bring back blocks that the store before it has evicted."""
    _scanned: int = 0
    """`Part.last_use` up to which no part needs a scan: its blocks that were requested twice are on the disk, or could
    not be stored."""
    _host: TierBlocks = field(init=False)
    _disk: TierBlocks = field(init=False)
    _least_blocks: int = field(init=False)
    """The blocks of the smallest unit of any component."""

    def __post_init__(self) -> None:
        self._host, self._disk = self.watermark.source, self.watermark.there
        self._least_blocks = min(
            component.width for component in self.watermark.cache.layout.components if component.width
        )

    def plan(self, most: int, *, is_idle: bool, only_requested_twice: bool) -> list[Job]:
        """Store at most `most` blocks that the host is about to evict; with `is_idle`, also blocks that were requested
        twice, as far as the disk has free slots."""
        watermark, jobs = self.watermark, list[Job]()
        if most <= 0:
            return []
        wanted = self._requested_stop if only_requested_twice else self._whole_stop
        before, self._came_to = self._came_to, (*self._nearness(), only_requested_twice)
        if self._came_to != before:
            self._turns = {run: self._num_blocks(run, self._host) for run in watermark.about_to_lose(wanted)}
        if self._turns:
            jobs += self._take_turns(most, wanted)
        if is_idle and not watermark.nothing_changed():
            left = min(left_of(most, jobs), self._disk.pool.num_free)  # evict nothing: stores would never end
            jobs += watermark.store(self._requested_twice(left), self._requested_stop, left)
            if left_of(most, jobs) <= 0:
                watermark.seen = ()  # more may be left to store, even if nothing changes
        return jobs

    @property
    def are_due(self) -> bool:
        """Whether `plan`, called with the same arguments as before, may find more to store."""
        watermark = self.watermark
        return bool(self._turns) or self._nearness() != self._came_to[:2] or watermark.state() != watermark.seen

    def _take_turns(self, most: int, wanted: Callable[[Run], int]) -> list[Job]:
        """Store the runs that still have a turn, in eviction order. The turn of a run ends when nothing of it is left
        to store, or when a store has evicted other blocks of the same run from the disk. If `most` cuts a run off, the
        next call goes on with it."""
        jobs, least = list[Job](), self._least_blocks
        runs = self.watermark.about_to_lose(wanted)
        if not self.watermark.jobs.num_stored_now(self._host.tier):  # during stores, `runs` lacks some runs
            self._turns = {run: self._turns[run] for run in runs if self._turns.get(run)}
        for run in runs:
            left = min(left_of(most, jobs), self._turns.get(run, 0))
            if left > 0:
                before = self._num_blocks(run, self._disk)
                found = self.watermark.store([run], wanted, left)
                jobs += found
                over = left_of(left, found)
                is_over = over >= least or self._num_blocks(run, self._disk) < before
                self._turns[run] = 0 if is_over else self._turns[run] - (left - over)
            if left_of(most, jobs) < least:
                return jobs
        self._turns.clear()
        return jobs

    @staticmethod
    def _num_blocks(run: Run, blocks: TierBlocks) -> int:
        """The number of blocks that a tier holds of the path of `run`."""
        return sum(len(part.blocks) for each in run.path() for part in each.parts_in(blocks.tier))

    def _nearness(self) -> tuple[object, ...]:
        """Changes once the host has used one more part of the watermark, or the disk was reset."""
        host = self._host
        return (host.num_evicted - host.pool.num_free) // self.watermark.step, self._disk.num_resets

    def plan_flush(self, most: int) -> list[Job]:
        """Store at most `most` of the blocks that the disk lacks, the last used first, as far as the disk can hold all
        of them: no call evicts a block that an earlier call has stored."""
        parts = list(self._host.order)[::-1]
        stops = self._stops_that_fit(parts)

        def wanted(run: Run) -> int:
            return min(self._whole_stop(run), stops.get(run, run.start))

        return self.watermark.store(self.watermark.lacking(parts, NO_LIMIT, wanted), wanted, most)

    def _stops_that_fit(self, parts: list[Part]) -> dict[Run, int]:
        """The unit up to which the disk can hold each run of `parts`. Runs on their way to the disk come first, because
        they are pinned and so in no eviction order."""
        jobs = [job for job in self.watermark.jobs.unsettled.values() if job.plan.destination is self._disk.tier]
        runs = [run for job in jobs for run in job.run.path()] + [part.run for part in parts]
        stops, left = dict[Run, int](), self._disk.capacity
        for run in dict.fromkeys(runs):
            num_blocks = sum(len(part.blocks) for part in run.parts_in(self._host.tier))
            if num_blocks > left:
                stops[run] = run.start + left // self.watermark.cache.layout.width  # eviction would take its tail first
                break
            stops[run] = run.stop
            left -= num_blocks
        return stops

    def _whole_stop(self, run: Run) -> int:
        """The unit up to which host and disk together hold the path of `run` without a gap, because nothing after a gap
        (a corrupt block) could be published."""
        source, destination = self.watermark.stores.source, self.watermark.stores.destination
        if not run.parts[source].width:
            return run.stop
        for current in run.whole_path():
            reached = max(current.parts[source].stop, covered_stop(current.parts[destination]))
            if reached < current.stop:
                return reached
        return run.stop

    def _requested_stop(self, run: Run) -> int:
        return min(self._whole_stop(run), self.counts.requested_stop(TokenSequence.of_path(run), run.stop))

    def _requested_twice(self, num_blocks: int) -> list[Run]:
        """Runs with about `num_blocks` blocks that were requested twice and that the disk may lack."""
        found: dict[Run, None] = {}
        scanned = self._scanned  # parts that were used together have the same number: each of them is scanned
        unseen = (part for part in self._host.order if part.last_use > scanned)
        for part in islice(unseen, MAX_SCANNED):
            if num_blocks <= 0:
                break
            if self.watermark.lacking((part,), 1, self._requested_stop):
                found[part.run] = None
                num_blocks -= len(part.blocks)
            elif not found:
                self._scanned = part.last_use
        return list(found)


@dataclass(slots=True, eq=False)
class Restores:
    cache: PrefixCache
    disk: DiskBlocks
    pool: TakesIds
    """The pool of `disk`."""
    _ends: dict[bytes, Run] = field(default_factory=dict)
    """By the digest of the prefix up to its end: the run that ended there when it was restored."""
    _bare: dict[bytes, RestoredRun] = field(default_factory=dict)
    """Runs without slots, by the same digest: they enter the index with the first run after them."""

    def restore(self, found: RestoredRun) -> int:
        """Restore `found`. Returns how many of its slots are in use now: 0 if the disk does not hold the prefix before
        it, or its slots are not free."""
        if self.cache.layout.full.width and not found.slots[0]:
            return 0  # no hit could end in it, nor after it
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
        """The run with the unit before `stop` of the prefix with `digest`, if the disk holds it up to there."""
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
        # It may have been merged into the run after it, and that run may have been split again.
        while run is not None and (not run.parts or run.start >= stop):
            run = run.before
        if run is None or run.stop < stop or run.epoch != self.cache.epoch:
            return None
        part = run.parts[Tier.DISK]
        is_there = not part.width or part.stop >= stop
        return run if is_there and _hash_up_to(run, stop).digest() == digest else None

    def _enter(self, found: RestoredRun, before: Run | None, root: Root) -> int:
        """Insert the tokens of `found` after `before`, and let the disk hold its slots there. Returns their number."""
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
                return taken  # a unit was found corrupt meanwhile: no fetch could bring the units after it
            start = run.stop
        assert run is not None
        self._ends[found.digest] = run
        return taken

    def _fill(self, run: Run, number: int, found: RestoredRun) -> int:
        """Let `run` hold its slots in one component, unless the disk holds other blocks of it, or will. Returns their
        number."""
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

"""Stores to the disk: what the host is about to evict, what was asked for twice, and at the end what is left.

A prefix goes whole: the disk holds nothing whose front it lacks. How much may be written, and when, the caller says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from .policy import AlsoCounts
from .presence import covered_stop
from .records import Job, Part, Run
from .stores import left_of
from .table import NO_LIMIT
from .tiers import TierBlocks
from .tokens import TokenSequence
from .watermark import EvictionWatermark

__all__ = ["STEPS", "DiskStores"]

STEPS = 16
"""The host is looked at each time that it has used one of so many parts of the watermark."""
MAX_LOOKED_AT = 64
"""Prefixes of which one call asks how often they were asked for."""


@dataclass(slots=True, eq=False)
class DiskStores:
    watermark: EvictionWatermark
    counts: AlsoCounts
    _came_to: tuple[object, ...] = ()
    """The situation at the last scan of what the host is about to evict."""
    _turns: dict[Run, int] = field(default_factory=dict)
    """Runs that the disk lacked at that scan, each with the number of blocks that may still be stored for it. Empty
    once each run has had its turn. Turns end the writes to a disk that is smaller than the watermark: without them,
    each store would bring back blocks that the store before it has evicted."""
    _looked_at: int = 0
    """`Part.last_use` up to which all that was asked for twice is on the disk, or was not stored."""

    _host: TierBlocks = field(init=False)
    _disk: TierBlocks = field(init=False)
    _least_blocks: int = field(init=False)
    """The blocks of the smallest unit of any band."""

    def __post_init__(self) -> None:
        self._host, self._disk = self.watermark.source, self.watermark.there
        self._least_blocks = min(band.width for band in self.watermark.cache.layout.bands if band.width)

    def plan(self, most: int, *, is_idle: bool, only_asked_twice: bool) -> list[Job]:
        """Store at most `most` blocks of what the host is about to evict; with `is_idle`, also of what was asked for
        twice, as far as the disk has free slots."""
        watermark, jobs = self.watermark, list[Job]()
        if most <= 0:
            return []
        wanted = self._asked_stop if only_asked_twice else self._whole_stop
        if self._has_come_nearer(only_asked_twice):
            self._turns = {run: self._num_blocks(run, self._host) for run in watermark.about_to_lose(wanted)}
        if self._turns:
            jobs += self._take_turns(most, wanted)
        if is_idle and not watermark.nothing_changed():
            left = min(left_of(most, jobs), self._disk.pool.num_free)  # evicts nothing: or it would go round for ever
            jobs += watermark.store(self._asked_twice(left), self._asked_stop, left)
            if left_of(most, jobs) <= 0:
                watermark.look_again()
        return jobs

    @property
    def are_due(self) -> bool:
        """Whether `plan` may find something, wanting what it wanted before."""
        return bool(self._turns) or self._nearness() != self._came_to[:2] or self.watermark.has_changed

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

    def _has_come_nearer(self, only_asked_twice: bool) -> bool:
        """Whether the host has used a part of the watermark since it was looked at, or something else is wanted."""
        now = (*self._nearness(), only_asked_twice)
        before, self._came_to = self._came_to, now
        return now != before

    def _nearness(self) -> tuple[object, ...]:
        host = self._host
        return (host.num_evicted - host.pool.num_free) // self.watermark.step, self._disk.num_resets

    def plan_flush(self, most: int) -> list[Job]:
        """Store at most `most` blocks of all that the disk lacks, what was used last first, as far as the disk can hold
        it all: call after call, no block of that is evicted for another one."""
        parts = list(self._host.order)[::-1]
        stops = self._stops_that_fit(parts)

        def wanted(run: Run) -> int:
            return min(self._whole_stop(run), stops.get(run, run.start))

        return self.watermark.store(self.watermark.lacking(parts, NO_LIMIT, wanted), wanted, most)

    def _stops_that_fit(self, parts: list[Part]) -> dict[Run, int]:
        """The unit up to which the disk can hold each run of `parts`, behind what is on its way there, which is pinned
        and in no order."""
        jobs = [job for job in self.watermark.jobs.unsettled.values() if job.plan.destination is self._disk.tier]
        runs = [run for job in jobs for run in job.run.path()] + [part.run for part in parts]
        stops, left = dict[Run, int](), self._disk.capacity
        for run in dict.fromkeys(runs):
            num_blocks = sum(len(part.blocks) for part in run.parts_in(self._host.tier))
            if num_blocks > left:
                stops[run] = run.start + left // self.watermark.cache.layout.width  # its tail is what goes first
                break
            stops[run] = run.stop
            left -= num_blocks
        return stops

    def _whole_stop(self, run: Run) -> int:
        """The unit up to which host and disk together hold the path of `run` without a gap. What is behind a block that
        was found corrupt could not be published."""
        source, destination = self.watermark.stores.source, self.watermark.stores.destination
        if not run.parts[source].width:
            return run.stop
        for current in run.whole_path():
            reached = max(current.parts[source].stop, covered_stop(current.parts[destination]))
            if reached < current.stop:
                return reached
        return run.stop

    def _asked_stop(self, run: Run) -> int:
        return min(self._whole_stop(run), self.counts.asked_stop(TokenSequence.of_path(run), run.stop))

    def _asked_twice(self, num_blocks: int) -> list[Run]:
        """Runs with about `num_blocks` blocks that were asked for twice and may be missing on the disk."""
        found: dict[Run, None] = {}
        for part in islice(self._not_looked_at(), MAX_LOOKED_AT):
            if num_blocks <= 0:
                break
            if self.watermark.lacking((part,), 1, self._asked_stop):
                found[part.run] = None
                num_blocks -= len(part.blocks)
            elif not found:
                self._looked_at = part.last_use
        return list(found)

    def _not_looked_at(self) -> Iterator[Part]:
        """Of parts that were used together, all: what was looked at meanwhile does not count."""
        looked_at = self._looked_at
        for part in self._host.order:
            if part.last_use > looked_at:
                yield part

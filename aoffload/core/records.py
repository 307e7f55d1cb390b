"""Records: runs, parts, leases, jobs, loads. They refer to each other, so they are in one file.

Run <- Part -> Job      the blocks of one run in one band and tier, and the job that adds to them
Lease -> Run            references that protect cached blocks
Job -> Lease, Run       one transfer, with leases of its own
Load -> Job             what a request waits for
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from ..prefix import Hasher, KeySpan, Root
from .lifecycle import JobState
from .plan import NUM_TIERS, Completion, Tier, TransferPlan
from .tokens import hash_run
from .tombstones import Tombstone

__all__ = [
    "Claim", "Job", "Lease", "Load", "NoIndex", "Part", "Run",
]  # fmt: skip


class NoIndex(enum.Enum):
    """Replaces the epoch of a job or a request of which nothing is published."""

    INVALIDATED = "invalidated"
    """A request may have read wrong KV; or what a job brings is wrong, or was withdrawn."""
    ORPHANED = "orphaned"
    """A reset of the device tier has made the blocks of the request unfindable."""


def _no_ids() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False, repr=False)
class Part:
    """The blocks of one run in one band and one tier: those of units `[first, stop)`. For full attention `first` is
    the run's start. A part without blocks has first == stop == the run's start."""

    tier: Tier
    band: int
    width: int
    """Block ids per unit."""
    run: Run
    first: int
    stop: int
    blocks: array[int] = field(default_factory=_no_ids)
    """len(blocks) == (stop - first) * width."""
    num_references: int = 0
    """Full attention: leases that end at this run plus referenced child runs. Window: leases that cover this run.
    Zero: evictable, linked in the eviction order."""
    incoming: Job | None = None
    """The last unsettled job that adds to this part."""
    tombstones: tuple[Tombstone, ...] = ()
    """Unfindable blocks that references still protect; freed with the last reference."""
    last_use: int = 0
    """When its last use ended, as a count of the eviction order; 0 while in use."""
    older: Part | None = None
    newer: Part | None = None

    def __str__(self) -> str:
        return f"{self.stop - self.first}/{self.num_references}"

    @property
    def covered_stop(self) -> int:
        """End of the units that the tier holds of this run or that jobs in flight will add."""
        return self.stop if self.incoming is None else max(self.stop, self.stop_of(self.incoming))

    def stop_of(self, job: Job) -> int:
        """End of the units that `job` adds to this part. The job may continue in later runs."""
        return min(job.stop, self.run.stop)

    @property
    def covered(self) -> tuple[int, int]:
        """(first, stop) of the units that the tier holds of this run or that jobs in flight will add; equal if none."""
        job, first, stop = self.incoming, self.first, self.stop
        if job is None:
            return first, stop
        last_stop = self.stop_of(job)
        if not self.blocks:
            first, stop = max(self.run.start, job.start), last_stop
        while job is not None and not job.is_settled and job.stop > self.run.start:
            first = min(first, max(self.run.start, job.start))
            job = job.predecessor
        return first, max(stop, last_stop)

    def ids(self, start: int, stop: int) -> array[int]:
        """The ids of units `[start, stop)`, all of them in this part."""
        return self.blocks[(start - self.first) * self.width : (stop - self.first) * self.width]

    def append(self, ids: array[int], stop: int) -> None:
        """Append `ids`, which reach up to unit `stop`."""
        if self.blocks:
            self.blocks.extend(ids)
        else:
            self.blocks = ids[:]  # exact size: an extended array keeps spare capacity
        self.stop = stop

    def enter(self, first: int, last: int, ids: array[int]) -> range:
        """Add `ids` for the units of `[first, last)` that the part lacks; the range must touch the part. Returns the
        units that the part held already, whose ids it does not take."""
        if not self.blocks:
            self.first = self.stop = first
        known = range(max(first, self.first), max(first, self.first, min(last, self.stop)))
        if first < self.first:
            self.blocks = ids[: (self.first - first) * self.width] + self.blocks
            self.first = first
        if last > self.stop:
            self.blocks.extend(ids[(self.stop - first) * self.width : (last - first) * self.width])
            self.stop = last
        return known

    def cut_off(self, head: Run, start: int, at: int, num_references: int, incoming: Job | None) -> Part:
        """Split at unit `at`. Returns the front as a part of `head`, which begins at unit `start`; keeps the rest."""
        front = Part(self.tier, self.band, self.width, head, start, start, _no_ids(), num_references, incoming)
        front.tombstones, front.last_use = self.divide_tombstones(at), self.last_use
        if self.first < at:
            front.first, front.stop = self.first, min(at, self.stop)
        cut = (front.stop - front.first) * self.width
        front.blocks, self.blocks = self.blocks[:cut], self.blocks[cut:]  # exact size
        self.first, self.stop = max(self.first, at), max(self.stop, at)
        if not self.blocks:
            self.empty_at(at)
        return front

    def hand_over(self, front: Part, at: int) -> int:
        """Move the blocks before unit `at` to `front`, the part right before this one. Returns their number."""
        front.tombstones += self.divide_tombstones(at)
        count = (min(max(at, self.first), self.stop) - self.first) * self.width
        if count and not front.blocks:
            front.first = front.stop = self.first
        if count:
            front.blocks.extend(self.blocks[:count])
            front.stop += count // self.width
            del self.blocks[:count]
        self.first, self.stop = max(self.first, at), max(self.stop, at)
        if not self.blocks:
            self.empty_at(at)
        return count

    def join(self, fronts: Sequence[Part]) -> None:
        """Prepend the blocks of `fronts`, the parts right before this one, nearest first."""
        nearest = next((front for front in fronts if front.blocks), None)
        if nearest is None:
            return
        if not self.blocks:
            self.stop = nearest.stop
        blocks = _no_ids()
        for front in reversed(fronts):
            blocks.extend(front.blocks)
        self.blocks = blocks + self.blocks
        self.first = self.stop - len(self.blocks) // self.width

    def empty_at(self, start: int) -> None:
        """Move an empty part to unit `start`, where its run begins."""
        self.first = self.stop = start

    def awaits(self, job: Job | None) -> None:
        """Set the last job in flight that adds to this part."""
        self.incoming = job

    def drop_behind(self, stop: int) -> array[int]:
        """Truncate the part to end at unit `stop`. Returns the dropped blocks."""
        keep = max(0, stop - self.first) * self.width
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        self.stop = stop
        if not self.blocks:
            self.first = self.stop = self.run.start
        return dropped

    def clear(self) -> array[int]:
        """Empty the part. Returns the blocks it held."""
        return self.drop_behind(self.first)

    def entomb(self, start: int, ids: array[int]) -> None:
        """Add a tombstone for `ids`, which the part held from unit `start` on."""
        self.tombstones = (*self.tombstones, Tombstone(start, ids))

    def tombstone_ids(self) -> array[int]:
        return sum((one.ids for one in self.tombstones), array("i"))

    def take_tombstones(self) -> array[int]:
        """Remove all tombstones. Returns their blocks."""
        ids, self.tombstones = self.tombstone_ids(), ()
        return ids

    def divide_tombstones(self, at: int) -> tuple[Tombstone, ...]:
        """Keep the tombstones from unit `at` on. Returns those before it, for the part that gets these units."""
        units = [unit for one in self.tombstones for unit in one.units(self.width)]
        self.tombstones = tuple([unit for unit in units if unit.start >= at])
        return tuple([unit for unit in units if unit.start < at])

    def disown(self, ids: Container[int]) -> None:
        """Remove `ids` from the tombstones without freeing them: a request owns these blocks from here on."""
        units = [unit for one in self.tombstones for unit in one.units(self.width)]
        self.tombstones = tuple([unit for unit in units if unit.ids[0] not in ids])


@dataclass(slots=True, eq=False, repr=False)
class Run:
    key: bytes
    before: Run | None
    start: int
    stop: int
    tokens: bytes
    spans: tuple[KeySpan, ...]
    hash_before: Hasher
    epoch: int
    root: Root
    parts: tuple[Part, ...] = ()
    """By band, then by tier: `parts[tier]` is that of full attention."""
    offered_stop: int = 0
    """End of the units to store in the host before they are evicted. The runs before are offered as well."""
    num_after: int = 0
    """Child runs: those whose `before` is this one. A run stays in the index while it has any."""
    _hash_after: Hasher | None = None

    def __repr__(self) -> str:
        held = " ".join(f"{part.tier.name.lower()}={part}" for part in self.parts)
        return f"<Run [{self.start},{self.stop}) {held}>"

    @property
    def hash_after(self) -> Hasher:
        if self._hash_after is None:
            unit_bytes = len(self.tokens) // (self.stop - self.start)
            self._hash_after = hash_run(self.hash_before, self.tokens, self.spans, unit_bytes)
        return self._hash_after

    def part(self, tier: Tier, band: int) -> Part:
        return self.parts[band * NUM_TIERS + tier]

    def parts_in(self, tier: Tier) -> tuple[Part, ...]:
        """The parts of one tier, by band."""
        return self.parts[tier::NUM_TIERS]

    def whole_path(self) -> list[Run]:
        """This run and all before it, in prefix order."""
        if self.before is None:
            return [self]
        return [*self.path()][::-1]

    def path(self) -> Iterator[Run]:
        """This run and all before it, last first."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.before

    def holds_nothing(self) -> bool:
        return not self.num_after and all(
            not part.blocks and not part.num_references and part.incoming is None for part in self.parts
        )


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """Pins, in one tier, the blocks of `run` and of every run before it. `PrefixCache` takes and releases leases.

    A lease refers to a run object, never to block ids or keys. A split puts a new head before that run, so the head is
    on the path and stays pinned. No change of the index can make a lease release the wrong blocks.
    """

    tier: Tier
    run: Run
    starts: list[int] = field(default_factory=list)
    """For each window band: the first unit whose blocks are pinned, always the start of a run. At or beyond the end of
    `run`: none is pinned."""
    released: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Job:
    plan: TransferPlan
    run: Run
    """The run in which the job's units end. The runs before it are found through `before`."""
    start: int
    stop: int
    epoch: int | NoIndex
    band: int
    """The band whose blocks it copies. A transfer of several bands is several jobs."""
    source_lease: Lease | None
    destination_lease: Lease | None
    """Keeps the run, and the blocks before the new ones, until the job is settled. Either lease is None where the
    blocks are engine-owned: there the job holds the blocks themselves."""
    predecessor: Job | None
    """The unsettled job that brings the units before. Publishing waits for it and so follows prefix order."""
    request_id: str
    """The request that caused it; empty for write-back before eviction."""
    state: JobState = JobState.QUEUED
    claims: dict[Claim, None] = field(default_factory=dict)
    """The owners whose loads wait for this job. A queued load job without claims is discarded."""
    followers: list[Job] = field(default_factory=list)
    parked: Completion | None = None
    """Its completion, kept while the predecessor is unsettled."""
    completion: Completion | None = None

    def claimed_by(self, claim: Claim) -> None:
        """Record that `claim` waits for this job."""
        self.claims[claim] = None

    def unclaimed_by(self, claim: Claim) -> None:
        self.claims.pop(claim, None)

    def end_claims(self) -> None:
        """Drop all claims: the job is settled."""
        self.claims.clear()

    def publish_nothing(self) -> None:
        """What it brings is wrong, or was withdrawn."""
        self.epoch = NoIndex.INVALIDATED

    def __repr__(self) -> str:
        return f"<Job {self.job_id} {self.plan.direction.value} [{self.start},{self.stop}) {self.state.name}>"

    def __str__(self) -> str:
        return f"job {self.job_id}"

    @property
    def job_id(self) -> int:
        return self.plan.job_id

    def leases(self) -> list[Lease]:
        return [lease for lease in (self.source_lease, self.destination_lease) if lease is not None]

    @property
    def is_settled(self) -> bool:
        return self.completion is not None or self.state is JobState.DISCARDED


@dataclass(slots=True, eq=False, repr=False)
class Claim:
    """An owner that may wait for jobs: a request or a cache transfer."""

    load: Load | None = field(default=None, kw_only=True)

    def began_load(self, load: Load) -> None:
        self.load = load

    def ended_load(self) -> None:
        self.load = None


@dataclass(slots=True, eq=False, repr=False)
class Load:
    """A load up to unit `stop`, as one `Holding` waits for it."""

    stop: int
    wake: Callable[[], object]
    jobs: set[Job] = field(default_factory=set)
    """Its unsettled jobs, including those shared with other requests."""
    units_per_job: Sequence[int] = ()
    """Maximum units of one job, per band. Empty: the default of `JobBook`."""

    def wake_by(self, wake: Callable[[], object]) -> None:
        """Replace `wake`: another task waits for the load."""
        self.wake = wake

    def shorten(self, stop: int) -> None:
        """Lower the end of the load to unit `stop`."""
        self.stop = stop

"""Records: runs and what tiers hold of them, leases, jobs, loads. They refer to each other, so they are in one file.

Run <- Part -> Job      what one run holds of one band in one tier, and what is on its way there
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
from .plan import Completion, Tier, TransferPlan
from .tokens import hash_run
from .tombstones import Tombstone

__all__ = [
    "Claim", "Job", "Lease", "Load", "NoIndex", "Part", "Run",
]  # fmt: skip


class NoIndex(enum.Enum):
    """In place of an epoch: no index takes what such a job brings, or such a request has computed."""

    INVALIDATED = "invalidated"
    """Its bytes turned out to be wrong."""
    ORPHANED = "orphaned"
    """A reset of the device has made the blocks of the request unfindable."""


def _no_ids() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False, repr=False)
class Part:
    """What one run holds of one band in one tier: the blocks of `[first, stop)`. The spine's begin at the run's start;
    a part without blocks is at the run's start, too."""

    tier: Tier
    band: int
    width: int
    """Ids for each unit."""
    run: Run
    first: int
    stop: int
    blocks: array[int] = field(default_factory=_no_ids)
    """`width` ids for each unit; len(blocks) == (stop - first) * width."""
    num_references: int = 0
    """Of the spine: leases that end at this run + runs right behind it that are referenced. Of a window: leases that
    cover this run. 0: evictable, and in the order."""
    incoming: Job | None = None
    """The last job in flight that adds to this part."""
    tombstones: tuple[Tombstone, ...] = ()
    """Forgotten blocks that references still protect; free when they are gone."""
    last_use: int = 0
    """When the last one who used it let go, as its order counts; 0 while somebody uses it."""
    older: Part | None = None
    newer: Part | None = None

    def __str__(self) -> str:
        return f"{self.stop - self.first}/{self.num_references}"

    @property
    def covered_stop(self) -> int:
        """Up to where the tier holds this run, or will when the jobs in flight have landed."""
        return self.stop if self.incoming is None else max(self.stop, self.stop_of(self.incoming))

    def stop_of(self, job: Job) -> int:
        """Up to where `job`, which adds to this part, does so: it may go on behind it."""
        return min(job.stop, self.run.stop)

    @property
    def covered(self) -> tuple[int, int]:
        """From where up to where the tier holds this run, or will; first == last if it does not."""
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
        """The ids of units `[start, stop)`, which lie in this part."""
        return self.blocks[(start - self.first) * self.width : (stop - self.first) * self.width]

    def append(self, ids: array[int], stop: int) -> None:
        """Let the part go on with `ids` up to unit `stop`."""
        if self.blocks:
            self.blocks.extend(ids)
        else:
            self.blocks = ids[:]  # of just this size: an array that was extended keeps room for more
        self.stop = stop

    def enter(self, first: int, last: int, ids: array[int]) -> range:
        """Hold `ids` for those of units `[first, last)` that it lacks; they have to adjoin what it holds. The units
        that it held before, for which it does not take them."""
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
        """A part of `head`, which begins at unit `start`, with what it holds before unit `at`. It keeps the rest."""
        front = Part(self.tier, self.band, self.width, head, start, start, _no_ids(), num_references, incoming)
        front.tombstones, front.last_use = self.divide_tombstones(at), self.last_use
        if self.first < at:
            front.first, front.stop = self.first, min(at, self.stop)
        cut = (front.stop - front.first) * self.width
        front.blocks, self.blocks = self.blocks[:cut], self.blocks[cut:]  # of just this size
        self.first, self.stop = max(self.first, at), max(self.stop, at)
        if not self.blocks:
            self.empty_at(at)
        return front

    def hand_over(self, front: Part, at: int) -> int:
        """Give `front`, which lies right before it, what it holds before unit `at`; how many blocks."""
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
        """Take over what `fronts` hold, which lie right before it, nearest first."""
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
        """It holds nothing, and its run begins at unit `start`."""
        self.first = self.stop = start

    def awaits(self, job: Job | None) -> None:
        """`job` is the last one in flight that adds to it."""
        self.incoming = job

    def drop_behind(self, stop: int) -> array[int]:
        """Let the part end at `stop`; the blocks that were behind it."""
        keep = max(0, stop - self.first) * self.width
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        self.stop = stop
        if not self.blocks:
            self.first = self.stop = self.run.start
        return dropped

    def clear(self) -> array[int]:
        """Let the part hold nothing; what it has held."""
        return self.drop_behind(self.first)

    def entomb(self, start: int, ids: array[int]) -> None:
        """Forget `ids`, which it has held from unit `start` on, without freeing them."""
        self.tombstones = (*self.tombstones, Tombstone(start, ids))

    def tombstone_ids(self) -> array[int]:
        return sum((one.ids for one in self.tombstones), array("i"))

    def take_tombstones(self) -> array[int]:
        """The condemned blocks, which it has no more."""
        ids, self.tombstones = self.tombstone_ids(), ()
        return ids

    def divide_tombstones(self, at: int) -> tuple[Tombstone, ...]:
        """Keep those from unit `at` on; the others, which go when the references to another run do."""
        units = [unit for one in self.tombstones for unit in one.units(self.width)]
        self.tombstones = tuple([unit for unit in units if unit.start >= at])
        return tuple([unit for unit in units if unit.start < at])

    def disown(self, ids: Container[int]) -> None:
        """Know nothing more of `ids`, which are condemned here and another's from now on."""
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
    """Band by band, in each the tiers: `parts[tier]` is the spine's."""
    offered_stop: int = 0
    """Up to where somebody wants it in the host before it is lost; what lies before it on its path, too."""
    num_after: int = 0
    """Runs whose `before` is this one. A run stays as long as anything hangs on it."""
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
        return self.parts[band * len(Tier) + tier]

    def parts_in(self, tier: Tier) -> tuple[Part, ...]:
        """Of every band what one tier holds."""
        return self.parts[tier :: len(Tier)]

    def whole_path(self) -> list[Run]:
        """All runs before this one, and this one, in prefix order."""
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
    """Pins, in one tier, the blocks of `run` and of every run before it. Taken and released by the `PrefixCache`.

    It holds run objects, never block ids or keys: a split puts a new head before the run, which then lies on the
    path and stays pinned, and nothing that happens in the index can make it let go of the wrong blocks.
    """

    tier: Tier
    run: Run
    starts: list[int] = field(default_factory=list)
    """For each band of limited reach: the unit, always the start of a run, from which on its blocks are pinned, too.
    Beyond the end of `run` while none of them is."""
    released: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Job:
    plan: TransferPlan
    run: Run
    """Where the job's stretch ends; what lies before it is found through `before`."""
    start: int
    stop: int
    epoch: int | NoIndex
    band: int
    """The band of groups whose blocks it moves; a transfer of several is several jobs."""
    source_lease: Lease | None
    destination_lease: Lease | None
    """Keeps the run, and the blocks that the new ones follow, while the copy runs. None at the end that is an engine's:
    there a job holds the blocks that it touches."""
    predecessor: Job | None
    """The unsettled job that fills what lies before: settled first, so publishing follows prefix order."""
    request_id: str
    """Who wanted it; empty for what was stored because it would have been evicted."""
    state: JobState = JobState.QUEUED
    claims: dict[Claim, None] = field(default_factory=dict)
    """Whose load waits for this job. A queued load without one is discarded."""
    followers: list[Job] = field(default_factory=list)
    parked: Completion | None = None
    """It ended before its predecessor did."""
    completion: Completion | None = None

    def claimed_by(self, claim: Claim) -> None:
        """`claim` waits for it."""
        self.claims[claim] = None

    def unclaimed_by(self, claim: Claim) -> None:
        self.claims.pop(claim, None)

    def end_claims(self) -> None:
        """Nobody has to wait for it any more."""
        self.claims.clear()

    def publish_nothing(self) -> None:
        """What it brings is wrong, or not wanted any more."""
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
    """Whoever may wait for jobs: a request, or a transfer without one."""

    load: Load | None = field(default=None, kw_only=True)

    def began_load(self, load: Load) -> None:
        self.load = load

    def ended_load(self) -> None:
        self.load = None


@dataclass(slots=True, eq=False, repr=False)
class Load:
    """A load that a holding waits for, up to unit `stop`."""

    stop: int
    wake: Callable[[], object]
    jobs: set[Job] = field(default_factory=set)
    """Jobs not settled yet, its own and shared ones."""
    units_per_job: Sequence[int] = ()
    """What one job carries at most, for each band; empty: as much as any."""

    def wake_by(self, wake: Callable[[], object]) -> None:
        """Another task waits for it now."""
        self.wake = wake

    def shorten(self, stop: int) -> None:
        """It brings no more than what lies before unit `stop`."""
        self.stop = stop

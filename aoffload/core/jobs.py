"""Jobs: transfers between tiers, from the decision to the settlement.

A job owns its leases and its destination blocks, never the request's: whatever becomes of the request, the copy has a
source that stays and a destination that nobody else is given. The ids of an unfinished transfer are in no index.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import attrs

from .cache import PrefixCache
from .holding import Holding
from .index import Part, Run, Stretch, stretches
from .lease import Lease
from .lifecycle import JobState, Moves, require
from .plan import Completion, Direction, Outcome, Tier, TransferPlan

__all__ = ["Job", "JobBook"]


@attrs.define(eq=False, repr=False)
class Job:
    plan: TransferPlan
    run: Run
    """Where the job's stretch ends; what lies before it is found through `before`."""
    start: int
    stop: int
    epoch: int
    source_lease: Lease
    destination_lease: Lease
    """Keeps the run, and the blocks that the new ones follow, while the copy runs."""
    predecessor: Job | None
    """The unsettled job that fills what lies before: settled first, so publishing follows prefix order."""
    request_id: str
    state: JobState = JobState.QUEUED
    claims: dict[Holding, None] = attrs.field(factory=dict)
    """Holdings whose load waits for this job. A queued load without one is discarded."""
    followers: list[Job] = attrs.field(factory=list)
    parked: Completion | None = None
    """It ended before its predecessor did."""
    completion: Completion | None = None

    def __repr__(self) -> str:
        return f"<Job {self.job_id} {self.plan.direction.value} [{self.start},{self.stop}) {self.state.name}>"

    def __str__(self) -> str:
        return f"job {self.job_id}"

    @property
    def job_id(self) -> int:
        return self.plan.job_id

    @property
    def is_settled(self) -> bool:
        return self.completion is not None or self.state is JobState.DISCARDED


@attrs.define(eq=False, repr=False)
class JobBook:
    """Every job that is not settled, and those whose destination is quarantined."""

    cache: PrefixCache
    moves: Moves
    units_per_job: int
    unsettled: dict[int, Job] = attrs.field(factory=dict)
    quarantined: dict[int, Job] = attrs.field(factory=dict)
    num_late: int = 0
    """Completions that came a second time, or for a job that was given up."""
    _next_id: int = 1

    @property
    def last_id(self) -> int:
        """The id of the job planned last."""
        return self._next_id - 1

    # -- deciding -------------------------------------------------------------------------------------------------

    def plan(
        self, holding: Holding, source: Tier, destination: Tier, run: Run, start: int, stop: int, blocks: array[int]
    ) -> list[Job]:
        """Jobs that bring units `[start, stop)` of the path of `run` from `source` into `blocks` of `destination`."""
        width = self.cache.layout.width
        jobs: list[Job] = []
        for first in range(start, stop, self.units_per_job):
            last = min(first + self.units_per_job, stop)
            into = blocks[(first - start) * width : (last - start) * width]
            jobs.append(self._job(holding, source, destination, stretches(run, first, last), into))
        return jobs

    def _job(self, holding: Holding, source: Tier, destination: Tier, over: list[Stretch], blocks: array[int]) -> Job:
        source_ids = array("i")
        for stretch in over:
            source_ids.extend(self._blocks(stretch, source))
        end = over[-1]
        plan = TransferPlan(self._next_id, source, destination, source_ids, blocks)
        self._next_id += 1
        job = Job(
            plan, end.run, over[0].start, end.stop, self.cache.epoch,
            self.cache.lease(source, end.run), self.cache.lease(destination, end.run),
            self._predecessor(over[0], destination), holding.request_id,
        )  # fmt: skip
        if job.predecessor is not None:
            job.predecessor.followers.append(job)
        for stretch in over:
            part = stretch.run.parts[destination]
            part.incoming, part.incoming_stop = job, stretch.stop
        self.unsettled[job.job_id] = job
        return job

    def _blocks(self, stretch: Stretch, tier: Tier) -> array[int]:
        width, part = self.cache.layout.width, stretch.run.parts[tier]
        at = stretch.run.start
        return part.blocks[(stretch.start - at) * width : (stretch.stop - at) * width]

    @staticmethod
    def _predecessor(first: Stretch, tier: Tier) -> Job | None:
        run: Run | None = first.run
        if run is not None and first.start == run.start:
            run = run.before
        return None if run is None else run.parts[tier].incoming

    def launch(self, job: Job) -> bool:
        """Whether `job` is still wanted; then it counts as launched and can't be recalled."""
        if job.state is not JobState.QUEUED:
            return False
        self.moves.job(job, JobState.LAUNCHED)
        return True

    def unclaim(self, job: Job, holding: Holding) -> bool:
        """Whether `job` has lost its last waiter before it was launched; the caller discards it then."""
        job.claims.pop(holding, None)
        return not job.claims and job.state is JobState.QUEUED and job.plan.direction is Direction.LOAD

    # -- settling -------------------------------------------------------------------------------------------------

    def settle(self, completion: Completion) -> list[Job]:
        """Take in a completion, early, late or repeated; the jobs that it settled, in order."""
        job = self.unsettled.get(completion.job_id)
        if job is None:
            self._late(completion)
            return []
        if job.parked is not None:
            self.num_late += 1
            return []
        require(job, "settle", JobState.LAUNCHED)
        if (
            job.predecessor is not None
            and not job.predecessor.is_settled
            and completion.outcome is not Outcome.UNPROVEN
        ):
            job.parked = completion
            return []
        self._close(job, completion)
        return [job, *self._settle_followers(job)]

    def discard(self, job: Job) -> list[Job]:
        """Give up a queued job: nothing was started."""
        self.moves.job(job, JobState.DISCARDED)
        self._land(job, job.start, keep_ids=False)
        self._forget_job(job)
        return [job, *self._settle_followers(job)]

    def _settle_followers(self, job: Job) -> list[Job]:
        """Settle what waited for `job`; what is still on its way follows what `job` followed, so no chain breaks."""
        settled: list[Job] = []
        before = job.predecessor
        for follower in job.followers:
            if follower.parked is not None and follower.job_id in self.unsettled:
                self._close(follower, follower.parked)
                settled += [follower, *self._settle_followers(follower)]
            elif not follower.is_settled:
                follower.predecessor = before
                if before is not None:
                    before.followers.append(follower)
        job.followers.clear()
        return settled

    def _close(self, job: Job, completion: Completion) -> None:
        job.completion = completion  # settled from here on: no part may be told to wait for it any more
        unproven = completion.outcome is Outcome.UNPROVEN
        width = self.cache.layout.width
        num_units = (job.stop - job.start) if completion.outcome is Outcome.LANDED else completion.num_landed // width
        may_publish = job.epoch == self.cache.epoch and not unproven
        self._land(job, job.start + num_units if may_publish else job.start, keep_ids=unproven)
        if unproven:
            self.quarantined[job.job_id] = job
            self.cache.tiers[job.plan.destination].quarantine(job.plan.destination_ids)
        if completion.outcome is Outcome.CORRUPT and job.epoch == self.cache.epoch:
            self._forget_corrupt(job, completion)
        done = completion.outcome is Outcome.LANDED
        self.moves.job(job, JobState.COMPLETED if done else JobState.FAILED, completion.outcome.value)
        self._forget_job(job)

    def _forget_job(self, job: Job) -> None:
        del self.unsettled[job.job_id]
        self.cache.release(job.source_lease)
        self.cache.release(job.destination_lease)

    def _land(self, job: Job, proven_stop: int, *, keep_ids: bool) -> None:
        """Publish what is proven, in prefix order and onto the job's own runs; free the other destinations."""
        width, tier, ids = self.cache.layout.width, job.plan.destination, job.plan.destination_ids
        for stretch in stretches(job.run, job.start, job.stop):
            part = stretch.run.parts[tier]
            first, last = stretch.start, min(stretch.stop, proven_stop)
            unused = ids[(first - job.start) * width : (stretch.stop - job.start) * width]
            if first < last and self._in_order(tier, part, first, last):
                skip = (part.stop - first) * width  # somebody computed these meanwhile; theirs stay
                take = (last - first) * width
                part.blocks.extend(unused[skip:take])
                unused = unused[:skip] + unused[take:]
                part.stop = last
            if not keep_ids:
                self.cache.give(tier, unused)
            self._end_incoming(job, stretch.run, part)

    @staticmethod
    def _in_order(tier: Tier, part: Part, first: int, last: int) -> bool:
        """Whether blocks up to `last` may follow in `part`: what lies before `first` is there, something is missing."""
        if not first <= part.stop < last:
            return False
        before = part.run.before
        if first > part.run.start or before is None:
            return True
        return before.parts[tier].stop == before.stop

    @staticmethod
    def _end_incoming(job: Job, run: Run, part: Part) -> None:
        if part.incoming is not job:
            return
        part.incoming, part.incoming_stop = None, 0
        before = job.predecessor
        while before is not None and not _brings(before, run, part):
            before = before.predecessor
        if before is not None:
            part.incoming, part.incoming_stop = before, min(before.stop, run.stop)

    def _forget_corrupt(self, job: Job, completion: Completion) -> None:
        """The bad entries are misses from now on; what is around them is untouched."""
        width = self.cache.layout.width
        bad = {job.start + index // width for index in completion.corrupt if 0 <= index < job.plan.num_blocks}
        for position in sorted(bad):
            for stretch in stretches(job.run, position, position + 1):
                if stretch.run.parts[job.plan.source].stop > position:
                    self.cache.forget(job.plan.source, stretch.run, position)

    def _late(self, completion: Completion) -> None:
        self.num_late += 1
        job = self.quarantined.get(completion.job_id)
        if job is not None and completion.outcome is not Outcome.UNPROVEN:
            del self.quarantined[completion.job_id]
            self.cache.tiers[job.plan.destination].end_quarantine(job.plan.destination_ids)

    # -- stores ---------------------------------------------------------------------------------------------------

    def unstored(self, run: Run, first: int) -> Iterator[list[Stretch]]:
        """What the device holds of the path of `run` and the host neither has nor gets, as contiguous stretches.

        Looks at everything from unit `first` on, and before it as far as something is missing.
        """
        found: list[Stretch] = []
        for current in run.path():
            covered, there = current.parts[Tier.HOST].covered_stop, current.parts[Tier.DEVICE].stop
            if covered < there:
                found.append(Stretch(current, covered, there))
            if current.start < min(first, covered):
                break
        together: list[Stretch] = []
        for stretch in reversed(found):
            if together and together[-1].stop != stretch.start:
                yield together
                together = []
            together.append(stretch)
        if together:
            yield together

    def offer_stores(self, holding: Holding, first: int) -> list[Job]:
        """Store what is missing on the host of the path that `holding` leases; never waits for room."""
        run = holding.device_run
        if run is None or not self.cache.tiers[Tier.HOST].pool.num_blocks:
            return []
        jobs: list[Job] = []
        for over in self.unstored(run, first):
            jobs += self._store(holding, over)
        return jobs

    def _store(self, holding: Holding, over: list[Stretch]) -> list[Job]:
        width = self.cache.layout.width
        # Pinned before room is made: what is stored must not evict the prefix it hangs on.
        path = self.cache.lease(Tier.HOST, over[-1].run)
        start, wanted = over[0].start, over[-1].stop - over[0].start
        num_units = min(wanted, self.cache.tiers[Tier.HOST].room // width)
        jobs: list[Job] = []
        if num_units:
            blocks = self.cache.take(Tier.HOST, num_units * width)
            last = stretches(path.run, start, start + num_units)[-1].run
            run = self.cache.cut(last, start + num_units)
            jobs = self.plan(holding, Tier.DEVICE, Tier.HOST, run, start, start + num_units, blocks)
        if num_units < wanted:
            self.moves.observer.store_skipped(holding, (wanted - num_units) * width, "host_full")
        self.cache.release(path)
        return jobs


def _brings(job: Job, run: Run, part: Part) -> bool:
    """Whether `job` still adds to `part`: its stretch may go on in another branch than `run`."""
    return not job.is_settled and any(over.run is run for over in stretches(job.run, part.stop, job.stop))

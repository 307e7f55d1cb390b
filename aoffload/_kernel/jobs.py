"""Labels: what the blocks of a store to the disk hold, so that a restart can prove it from the tokens.

Jobs: transfers between tiers, from the decision to the settlement.

A job, not its request, owns the leases and the destination blocks. Whatever becomes of the request, the source stays
and the destination is given to no other owner. Destination ids of an unfinished transfer are in no index.

Stores: what of a path is stored, and the host blocks for it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import attrs

from .cache import PrefixCache, brings
from .events import Moves
from .index import Stretch, covered, held_ids, stretches
from .layout import Band
from .plans import BlockLabel, CellLabel, Completion, TransferPlan
from .pools import TierBlocks
from .records import NO_LIMIT, Job, Lease, Part, Run
from .requests import LedgerRequest
from .states import Direction, JobState, NoEpoch, Outcome, Tier, require
from .tokens import hash_run, unit_digests

__all__ = ["JobBook", "Stores", "first_stored", "labels_of", "left_of"]


def labels_of(over: list[Stretch], band: Band) -> tuple[BlockLabel | None, ...]:
    """A label for each block of `band` in the stretches, in prefix order.

    None from the first unit on that a span touches: what the span stands for is not in the tokens."""
    if any(run.spans for run in over[0][0].path()):
        return (None,) * (sum(stop - start for _, start, stop in over) * band.width)
    found: list[BlockLabel | None] = []
    for stretch in over:
        if stretch[0].spans:
            left = sum(stop - start for _, start, stop in over) * band.width - len(found)
            return (*found, *(None,) * left)
        found += _labels(stretch, band)
    return tuple(found)


def _labels(stretch: Stretch, band: Band) -> Iterator[BlockLabel]:
    run, start, stop = stretch
    unit_bytes = len(run.tokens) // (run.stop - run.start)
    first, last = (start - run.start) * unit_bytes, (stop - run.start) * unit_bytes
    tokens, root = bytes(run.tokens[first:last]), run.root.digest
    hasher = hash_run(run.hash_before, run.tokens[:first], (), unit_bytes)
    before = hasher.digest() if start else b""
    for number, digest in enumerate(unit_digests(hasher, tokens, unit_bytes)):
        of_unit = tokens[number * unit_bytes : (number + 1) * unit_bytes]
        for place in range(band.width):
            yield BlockLabel(band.number, place, start + number, root, digest, before, of_unit)
        before = digest


@dataclass(slots=True, eq=False, repr=False)
class JobBook:
    """The unsettled jobs, and those whose destination is quarantined."""

    cache: PrefixCache
    moves: Moves
    units_per_job: Sequence[int]
    """The most units of one job, for each band."""
    tiers: dict[Tier, TierBlocks] = field(init=False)
    """Those of the cache, and a remote store."""
    unsettled: dict[int, Job] = field(default_factory=dict)
    quarantined: dict[int, Job] = field(default_factory=dict)
    num_late: int = 0
    """Completions that came a second time, or for a job that was given up."""
    _next_id: int = 1
    _num_stored: Counter[Tier] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tiers = {tier.tier: tier for tier in self.cache.tiers}

    @property
    def last_id(self) -> int:
        """The id of the job planned last."""
        return self._next_id - 1

    # -- deciding -------------------------------------------------------------------------------------------------

    def plan(
        self,
        request: LedgerRequest | None,
        source: Tier,
        destination: Tier,
        run: Run,
        band: Band,
        start: int,
        stop: int,
        blocks: array[int],
        units_per_job: Sequence[int] = (),
        source_ids: array[int] | None = None,
        pin: Lease | None = None,
        cells: Sequence[CellLabel] = (),
    ) -> list[Job]:
        """Jobs that bring units `[start, stop)` of `band`, on the path of `run`, into `blocks` of `destination`, theirs
        from now on.

        `units_per_job` replaces the limit of the book. `source_ids`: the engine's blocks to copy from, if it owns the
        device. `pin`: a lease on `run` in `destination`, which the last job takes over. `cells`: those of a remote
        store that the units lie in, a job for each."""
        jobs: list[Job] = []
        if band.number and not self.tiers[destination].is_outside:
            self._make_adjoin(run, band, destination, start, stop)
        most = cells[0].stop - cells[0].start if cells else (units_per_job or self.units_per_job)[band.number]
        for begin in range(cells[0].start if cells else start, stop, most):
            first, last = max(begin, start), min(begin + most, stop)
            at, end = (first - start) * band.width, (last - start) * band.width
            into = blocks if end - at == len(blocks) else blocks[at:end]
            over = stretches(run, first, last)
            held = held_ids(run, source, band.number, first, last) if source_ids is None else source_ids[at:end]
            if destination is Tier.DISK:
                labels, generation = labels_of(over, band), self.tiers[destination].num_resets
                plan = TransferPlan(self._next_id, source, destination, held, into, labels, generation)
            elif cells:
                cell = cells[len(jobs)]
                plan = TransferPlan(self._next_id, source, destination, held, into, cell=cell)
            else:
                plan = TransferPlan(self._next_id, source, destination, held, into)
            self._next_id += 1
            jobs.append(self._job(request, plan, band, over, pin if last == stop else None))
        return jobs

    def _make_adjoin(self, run: Run, band: Band, tier: Tier, start: int, stop: int) -> None:
        """Split runs so that units `[start, stop)` leave no gap to what `tier` holds, or will get, of the same run: per
        tier, a run holds one stretch of a window band."""
        place = run.place(tier, band.number)
        for over, begin, end in stretches(run, start, stop):
            first, last = covered(over.parts[place])
            if first == last:
                continue
            if end < first:
                self.cache.split(over, end)
            elif begin > last:
                self.cache.split(over, begin)

    def _job(
        self, request: LedgerRequest | None, plan: TransferPlan, band: Band, over: list[Stretch], pin: Lease | None
    ) -> Job:
        (first, start, _), (run, _, stop) = over[0], over[-1]
        windows = self.cache.layout.windows
        # The leases pin no window band but the job's own, and that from the start of the job's first run on.
        starts = [first.start if other is band else run.stop for other in windows] if windows else ()
        source, destination = self.tiers[plan.source], self.tiers[plan.destination]
        read = written = None
        if source.is_outside:
            source.hold(plan.source_ids)
        else:
            # Storing must not refresh the source's LRU position.
            read = self.cache.lease(plan.source, run, starts, is_use=plan.destination < plan.source)
        if destination.is_outside:
            destination.hold(plan.destination_ids)
        elif pin is not None:
            written = pin
        else:
            written = self.cache.lease(plan.destination, run, starts)
        job = Job(
            plan, run, start, stop, self.cache.epoch, band.number, read, written,
            "" if request is None else request.request_id,
            0.0 if self.moves.clock is None else self.moves.clock(),
        )  # fmt: skip
        if written is not None:
            self._line_up(job, over)
        self.unsettled[plan.job_id] = job
        if plan.source < plan.destination < Tier.REMOTE:
            self._num_stored[plan.source] += len(plan.source_ids)
        return job

    def _line_up(self, job: Job, over: list[Stretch]) -> None:
        """Make `job` a follower of its predecessor, so that publishing keeps prefix order, and the `incoming` job of
        its parts.

        The predecessor is the job under way to the same run or, if `job` begins its run, to the run before. A window
        band may get the front of a run last, behind the job to the same run."""
        first = over[0][0]
        place = first.place(job.plan.destination, job.band)
        before: Run | None = first
        if job.start == first.start and (not job.band or first.parts[place].incoming is None):
            before = first.before
        job.predecessor = None if before is None else before.parts[place].incoming
        if job.predecessor is not None:
            job.predecessor.followers.append(job)
        for run, _, _ in over:
            run.parts[place].awaits(job)

    def launch(self, job: Job) -> bool:
        """Mark a queued `job` as launched: it cannot be recalled. False: it is no longer queued."""
        if job.state is not JobState.QUEUED:
            return False
        self.moves.job(job, JobState.LAUNCHED)
        return True

    def unclaim(self, job: Job, request: LedgerRequest) -> bool:
        """End the claim of `request`. True: the load is queued and has no claim left, so the caller discards it."""
        job.unclaimed_by(request)
        return not job.claims and job.state is JobState.QUEUED and job.plan.direction is Direction.LOAD

    def num_stored_now(self, source: Tier) -> int:
        """Blocks of `source` that stores under way read, to where the index will find them."""
        return self._num_stored[source]

    def ids_being_read(self, tier: Tier) -> list[array[int]]:
        """Blocks of `tier` that copies under way read, job by job."""
        return [job.plan.source_ids for job in self.unsettled.values() if job.plan.source is tier]

    def ids_being_written(self, tier: Tier) -> list[array[int]]:
        """Blocks of `tier` that copies may still write to, job by job."""
        jobs = (*self.unsettled.values(), *self.quarantined.values())
        return [job.plan.destination_ids for job in jobs if job.plan.destination is tier]

    # -- settling -------------------------------------------------------------------------------------------------

    def settle(self, completion: Completion) -> list[Job]:
        """Process a completion, which may be early, late or repeated; returns the jobs that it settled, in order."""
        job = self.unsettled.get(completion.job_id)
        if job is None:
            self._late(completion)
            return []
        if job.parked is not None:
            self.num_late += 1
            return []
        require(job, "settle", JobState.LAUNCHED)
        if completion.outcome is Outcome.LANDED and completion.num_landed not in (0, len(job.plan.source_ids)):
            completion = _landed_in_part(completion, job.plan.num_blocks)
        if completion.outcome is Outcome.UNPROVEN and job.plan.destination is Tier.REMOTE:
            completion = attrs.evolve(completion, outcome=Outcome.FAILED)  # it may still arrive, and is right then, too
        if (
            job.predecessor is not None
            and not job.predecessor.is_settled
            and completion.outcome is not Outcome.UNPROVEN
        ):
            job.parked = completion
            if job.epoch is NoEpoch.INVALIDATED:  # a restart before it is closed must not find its blocks
                self.tiers[job.plan.destination].invalidated(job.plan.destination_ids)
            return []
        self._close(job, completion)
        return [job, *self._settle_followers(job)] if job.followers else [job]

    def discard(self, job: Job) -> list[Job]:
        """Give up a queued job; returns the jobs settled by that."""
        self.moves.job(job, JobState.DISCARDED)
        self._land(job, job.start, keep_ids=False)
        self._forget_job(job)
        return [job, *self._settle_followers(job)]

    def _settle_followers(self, job: Job) -> list[Job]:
        """Settle the parked followers of `job`. The other followers get the predecessor of `job` as theirs, so that no
        chain breaks.

        A loop, not recursion: if copies end in reverse order, all launched jobs may be parked behind one another."""
        settled: list[Job] = []
        before, left = job.predecessor, job.followers[::-1]
        job.followers.clear()
        while left:
            follower = left.pop()
            if follower.is_settled:
                continue
            follower.predecessor = before
            if follower.parked is not None:
                self._close(follower, follower.parked)
                settled.append(follower)
                left += follower.followers[::-1]
                follower.followers.clear()
            elif before is not None:
                before.followers.append(follower)
        return settled

    def _close(self, job: Job, completion: Completion) -> None:
        job.completion = completion  # `is_settled` from here on: no part may keep it as `incoming`
        unproven = completion.outcome is Outcome.UNPROVEN
        width = self.cache.layout.bands[job.band].width
        # Of a copy that did not land as a whole, the proven front is published.
        num_units = (job.stop - job.start) if completion.outcome is Outcome.LANDED else completion.num_landed // width
        may_publish = job.epoch == self.cache.epoch and not unproven and job.destination_lease is not None
        self._land(job, job.start + num_units if may_publish else job.start, keep_ids=unproven)
        if unproven:
            self.quarantined[job.job_id] = job
            self.tiers[job.plan.destination].quarantine(job.plan.destination_ids)
        # Of a corrupt store only the copy is bad: requests compute with its source. A remote store forgets by itself.
        is_bad = completion.outcome is Outcome.CORRUPT and job.plan.direction is Direction.LOAD
        is_bad = is_bad and job.source_lease is not None
        if is_bad and job.run.epoch == self.cache.epoch:
            self._forget_corrupt(job, completion)
        if completion.outcome is Outcome.LANDED:
            self.moves.job(job, JobState.COMPLETED, "landed")
        else:
            self.moves.job(job, JobState.FAILED, completion.outcome.value)
        self._forget_job(job)

    def _forget_job(self, job: Job) -> None:
        plan = job.plan
        del self.unsettled[plan.job_id]
        if plan.source < plan.destination < Tier.REMOTE:
            self._num_stored[plan.source] -= len(plan.source_ids)
        if job.source_lease is not None:
            self.cache.release(job.source_lease)
        if job.destination_lease is not None:
            self.cache.release(job.destination_lease)
        if job.source_lease is None:
            self.tiers[job.plan.source].let_go(job.plan.source_ids)

    def _land(self, job: Job, proven_stop: int, *, keep_ids: bool) -> None:
        """Publish the proven blocks on the job's own runs, in prefix order; free the others unless `keep_ids`."""
        width, tier, ids = self.cache.layout.bands[job.band].width, job.plan.destination, job.plan.destination_ids
        if job.destination_lease is None:
            if not keep_ids:
                self.tiers[tier].let_go(ids)
            return
        component, place = self.cache.components[job.band], job.run.place(tier, job.band)
        for run, first, stop in stretches(job.run, job.start, job.stop):
            part, last = run.parts[place], min(stop, proven_stop)
            brought = ids[(first - job.start) * width : (stop - job.start) * width]
            if first < last:
                held = (part.first, part.stop)
                brought = component.enter(part, first, last, brought)
                self.cache.tiers[tier].part_changed(part, *held)
            if brought and not keep_ids:
                if job.epoch is NoEpoch.INVALIDATED:
                    self.cache.tiers[tier].invalidated(brought)
                self.cache.give(tier, brought)
            if part.incoming is job:
                part.awaits(self._next_incoming(job, part) if job.predecessor is not None else None)

    def _next_incoming(self, job: Job, part: Part) -> Job | None:
        """The nearest predecessor of `job` that still adds to `part`."""
        component, before = self.cache.components[part.band], job.predecessor
        while before is not None and not brings(component, before, part, part.run):
            before = before.predecessor
        return before

    def _forget_corrupt(self, job: Job, completion: Completion) -> None:
        """Make the corrupt source units misses; the units around them stay."""
        width = self.cache.layout.bands[job.band].width
        bad = {job.start + index // width for index in completion.corrupt if 0 <= index < job.plan.num_blocks}
        for position in sorted(bad):
            for run, _, _ in stretches(job.run, position, position + 1):
                part = run.part(job.plan.source, job.band)
                if part.first <= position < part.stop:
                    self.cache.forget(part, position)

    def _late(self, completion: Completion) -> None:
        self.num_late += 1
        job = self.quarantined.get(completion.job_id)
        if job is not None and completion.outcome is not Outcome.UNPROVEN:
            del self.quarantined[completion.job_id]
            self.tiers[job.plan.destination].end_quarantine(job.plan.destination_ids)


def _landed_in_part(completion: Completion, num_blocks: int) -> Completion:
    """A transport contradicts itself: the copy counts as FAILED, with the blocks that it names as proven."""
    named = completion.num_landed
    problem = f"reported as landed, with {named} of {num_blocks} blocks"
    return attrs.evolve(
        completion, outcome=Outcome.FAILED, num_landed=named if named < num_blocks else 0, error=problem
    )


@dataclass(slots=True, eq=False)
class Stores:
    """Best effort: never waits for room. Blocks that find none are offered again later."""

    cache: PrefixCache
    jobs: JobBook
    moves: Moves
    source: Tier
    destination: Tier

    def offer(
        self,
        request: LedgerRequest | None,
        run: Run,
        first: int,
        stop: int,
        *,
        with_windows: bool,
        most: int = NO_LIMIT,
    ) -> list[Job]:
        """Store what `destination` lacks of the path of `run` up to unit `stop`, from unit `first` on and before it as
        far as something is missing; `with_windows`: also what a hit near `stop` needs of window bands. At most `most`
        blocks. `request` is None for a write-back."""
        source, destination = self.source, self.destination
        if not self.cache.tiers[destination].pool.num_blocks:
            return []
        jobs: list[Job] = []
        full = self.cache.layout.full
        missing = self.cache.full.lacking(run, source, destination, first, stop) if full.width else []
        for over in _together(missing) if missing else ():
            jobs += self.store(request, full, over, most=left_of(most, jobs))
        if with_windows and self.cache.windows:
            end = self.last_end(request, stop)
            for window in self.cache.windows:
                missing = window.lacking(run, source, destination, first_stored(window.band, end), stop)
                for over in _together(missing) if missing else ():
                    jobs += self.store(request, window.band, over, most=left_of(most, jobs))
        return jobs

    def last_end(self, request: LedgerRequest | None, stop: int) -> int:
        """The last unit that a repeated request could hit: one token short, rounded down to its `hit_alignment`."""
        if request is None:
            return stop
        most = min(stop, (request.sequence.num_tokens - 1) // self.cache.layout.unit_tokens)
        return most - most % request.hit_alignment

    def store(
        self,
        request: LedgerRequest | None,
        band: Band,
        over: list[Stretch],
        source_ids: array[int] | None = None,
        most: int = NO_LIMIT,
        cells: Sequence[CellLabel] = (),
    ) -> list[Job]:
        """Store `over`, as far as `destination` has room and at most `most` blocks; from `source_ids`, where the blocks
        are an engine's, or from `cells` of a remote store."""
        # Pinned before room is made: the store must not evict the prefix before it.
        there, (_, start, _), (end, _, stop) = self.cache.tiers[self.destination], over[0], over[-1]
        pin = self.cache.lease(self.destination, end, [end.stop for _ in self.cache.layout.windows])
        wanted, fit, allowed = stop - start, there.num_available // band.width, most // band.width
        units = self.cache.components[band.number].fitting(start, stop, fit if fit < allowed else allowed)
        jobs: list[Job] = []
        is_handed = False
        if units:
            blocks = self.cache.take(self.destination, len(units) * band.width)
            run = self.cache.cut(pin.run, units.stop)
            if source_ids is not None:
                source_ids = source_ids[(units.start - start) * band.width : (units.stop - start) * band.width]
            is_handed = run is pin.run and not self.cache.windows
            jobs = self.jobs.plan(
                request, self.source, self.destination, run, band, units.start, units.stop, blocks, (), source_ids,
                pin if is_handed else None, cells,
            )  # fmt: skip
        if fit < wanted:
            reason = f"{self.destination.name.lower()}_full"
            self.moves.told.store_skipped(request, (wanted - fit) * band.width, reason)
        if not is_handed:
            self.cache.release(pin)
        return jobs


def left_of(most: int, jobs: list[Job]) -> int:
    """What is left of `most` blocks behind `jobs`."""
    return most if most == NO_LIMIT else most - sum(job.plan.num_blocks for job in jobs)


def first_stored(band: Band, end: int) -> int:
    """The first unit of a window band that is stored for a hit that ends at unit `end`: with a margin, since the next
    turn of a conversation may match somewhat earlier."""
    needed = band.first_unit(end)
    return max(0, needed - band.margin(end - needed))


def _together(found: list[Stretch]) -> Iterator[list[Stretch]]:
    """Group stretches, given last first, into lists without gaps, in prefix order."""
    together: list[Stretch] = []
    for stretch in reversed(found):
        if together and together[-1][2] != stretch[1]:
            yield together
            together = []
        together.append(stretch)
    if together:
        yield together

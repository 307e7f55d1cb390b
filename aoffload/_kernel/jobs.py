"""Jobs and stores. A job is one copy between two tiers, from the decision to the proof of its end. `Stores` decides
what is copied to a lower tier.

A job, not its request, owns two leases and the destination blocks. Whatever becomes of the request, the source blocks
keep their contents and no other owner gets the destination blocks, until the job is settled. The index does not know
the destination blocks before that: a match never finds bytes that are not proven to be there.

    QUEUED ----> LAUNCHED ----> COMPLETED    every block is proven at its destination
       |             `--------> FAILED       the leading `num_landed` blocks are proven
       `-----> DISCARDED                     no copy was begun, so the blocks are free at once

Why only proof ends a job. A copy runs on a device or in a thread, and no call can recall it. A request that is
cancelled, a deadline or an error of the transport say nothing about whether the copy still writes. If the destination
were freed on such a sign, the copy could overwrite blocks of another request. So the job stays LAUNCHED, and keeps
everything, until a completion settles it. A caller that stops waiting for a copy (`CopyQueue.give_up_late`) settles the
job as unproven: its requests go on, and its destination stays in quarantine until later proof.

What a completion may be, and what `JobBook.settle` makes of it:

    landed          all blocks are published
    failed, refused over for certain: the proven front, if any, is published, and the other blocks are freed
    corrupt         over for certain, and some bytes differ from what was stored. As failed; in addition, the units of a
                    load whose source is wrong become misses. The source of a store stays: requests compute with it
    contradictory   such as landed with fewer blocks than the plan, or with corrupt blocks among the proven ones. It
                    counts as failed, or as corrupt if it names corrupt blocks. Only the blocks before the first corrupt
                    one are proven, or none if the report names more blocks than the plan has
    unproven        it may still write. Nothing is published. The destination goes into quarantine, and the job is
                    settled: its request computes instead. A later completion that is not unproven ends the quarantine
    early           the predecessor (see Order) is not settled yet. The completion is parked, and the job is settled
                    with it right after the predecessor. An unproven completion is never parked: it publishes nothing,
                    so the order does not matter
    late, twice     the job is settled or parked already: counted (`num_late`) and otherwise ignored, unless it ends a
                    quarantine

Order. Full attention is published in prefix order, because a part holds the front of its run: block 5 is of no use
before block 4 is there. But copies end in any order. So each job knows its predecessor, the unsettled job that brings
the units before its own, and a predecessor knows its followers. When a job is settled or discarded, its parked
followers are settled, and the other followers inherit its predecessor. If a job brings less than planned, its followers
find a gap before their first unit and publish nothing.

`Part.incoming` names the job that was planned last for a part, and `predecessor` leads from it to others. So a second
load finds the jobs that bring its units, and shares them instead of copying again. The chain may miss jobs: if a copy
has failed, a load copies again from the gap on, and replaces the `incoming` of the parts after the gap. Then the same
units are copied twice. Code that needs all jobs, such as an invalidation, goes through `JobBook.unsettled`.

A job publishes nothing if the index was reset since it was planned (its epoch is old), or if its blocks were withdrawn
(`NoEpoch.INVALIDATED`). It keeps its leases to the end all the same.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import attrs

from .._common.tiers import BELOW, DEVICE, TIERS, Tier
from .cache import PrefixCache, brings
from .events import StoreSkipped
from .hooks import Hooks
from .index import Stretch, covered, held_ids, stretches
from .layout import Component
from .moves import Moves
from .plans import Completion, TransferPlan, agreeing
from .pools import TierBlocks
from .records import NO_LIMIT, Job, Lease, LedgerRequest, Load, Run
from .states import (
    CORRUPT,
    FAILED,
    JOB_COMPLETED,
    JOB_DISCARDED,
    JOB_FAILED,
    JOB_LAUNCHED,
    JOB_QUEUED,
    LANDED,
    LOAD,
    UNPROVEN,
    NoEpoch,
    require,
)


@dataclass(slots=True, eq=False, repr=False)
class JobBook:
    """Plans and settles jobs. Knows the unsettled jobs, and the settled jobs whose destination is in quarantine."""

    cache: PrefixCache
    moves: Moves
    hooks: Hooks
    units_per_job: Sequence[int]
    """The most units of one job, for each component."""
    tiers: dict[Tier, TierBlocks] = field(init=False)
    """The tiers that are there: those of the cache, and those that the cache does not know."""
    unsettled: dict[int, Job] = field(default_factory=dict)
    """By job id: queued, launched and parked jobs."""
    quarantined: dict[int, Job] = field(default_factory=dict)
    """By job id: jobs that ended UNPROVEN. A late completion ends the quarantine."""
    num_late: int = 0
    """Completions that came a second time, or for a job that is settled."""
    _next_id: int = 1
    _num_stored: Counter[Tier] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tiers = {tier.tier: tier for tier in self.cache.tiers if not tier.is_absent}

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
        component: Component,
        start: int,
        stop: int,
        blocks: array[int],
        units_per_job: Sequence[int] = (),
        source_ids: array[int] | None = None,
        pin: Lease | None = None,
        payloads: Sequence[object] = (),
    ) -> list[Job]:
        """Plan jobs that bring units `[start, stop)` of `component`, on the path of `run`, into `blocks` of
        `destination`. From now on the jobs own these blocks.

        `units_per_job` replaces the limit of the book. `source_ids`: the blocks to copy from, if the index does not
        know those of `source`. `pin`: a lease on `run` in `destination`, which the last job takes over. `payloads`: one
        for each plan, in place of those that `destination` makes. With `payloads`, each job ends at a multiple of the
        limit of units per job, or at `stop`."""
        jobs: list[Job] = []
        cache, is_use, number, width = self.cache, destination < source, component.number, component.width
        from_tier, to_tier, place = self.tiers[source], self.tiers[destination], run.place(destination, number)
        request_id = "" if request is None else request.request_id
        if number and not to_tier.is_outside:
            self._make_adjoin(run, component, destination, start, stop)
        most = (units_per_job or self.units_per_job)[number]
        for begin in range(start - start % most if payloads else start, stop, most):
            first, last = max(begin, start), min(begin + most, stop)
            at, end = (first - start) * width, (last - start) * width
            into = blocks if end - at == len(blocks) else blocks[at:end]
            pieces = stretches(run, first, last)
            held = held_ids(run, source, number, first, last) if source_ids is None else source_ids[at:end]
            if number and destination is DEVICE and 0 in into:
                # The engine has no blocks before a window that begins inside its first unit.
                held, into = array("i", compress(held, into)), array("i", filter(None, into))
            payload: object = None
            if payloads:
                payload = payloads[len(jobs)]
            elif destination > BELOW:  # copies of the device and the host have none
                payload = to_tier.payload_of(pieces, component)
            plan = TransferPlan(self._next_id, source, destination, held, into, payload)
            self._next_id += 1

            # Both leases pin full attention and, of the windows, only the job's own component, from the start of its
            # first run on.
            head, tail = pieces[0][0], pieces[-1][0]
            starts = cache.layout.starts_of(component, head.start, tail.stop)
            read = written = None
            if from_tier.is_outside:
                from_tier.hold(held)
            else:  # a store must not refresh the LRU position of its source
                read = cache.lease(source, tail, starts, is_use=is_use)
            if to_tier.is_outside:
                to_tier.hold(into)
            elif pin is not None and last == stop:
                written = pin
            else:
                written = cache.lease(destination, tail, starts)
            now = 0.0 if self.moves.clock is None else self.moves.clock()
            job = Job(plan, tail, first, last, cache.epoch, number, read, written, request_id, now)
            if written is not None:
                # The predecessor is the last job under way to the same part or, if `job` begins its run, to the part of
                # the run before. In a window component, a job for the front of a run may be planned after another job
                # to the same part, which then is its predecessor.
                before: Run | None = head
                if first == head.start and (not number or head.parts[place].incoming is None):
                    before = head.before
                if before is not None and (predecessor := before.parts[place].incoming) is not None:
                    job.predecessor = predecessor
                    predecessor.followers.append(job)
                for each, _, _ in pieces:
                    each.parts[place].incoming = job
            self.unsettled[plan.job_id] = job
            if not is_use and not to_tier.is_outside:
                self._num_stored[source] += len(held)
            jobs.append(job)
        return jobs

    def _make_adjoin(self, run: Run, component: Component, tier: Tier, start: int, stop: int) -> None:
        """Split runs so that units `[start, stop)` adjoin the units that `tier` holds, or will get, of the same run,
        because in each tier a run holds only one stretch of a window component."""
        place = run.place(tier, component.number)
        for each, begin, end in stretches(run, start, stop):
            first, last = covered(each.parts[place])
            if first == last:
                continue
            if end < first:
                self.cache.split(each, end)
            elif begin > last:
                self.cache.split(each, begin)

    def launch(self, job: Job) -> bool:
        """Mark a queued `job` as launched: only a completion can settle it from now on. False: it is not queued."""
        if job.state is not JOB_QUEUED:
            return False
        self.moves.job(job, JOB_LAUNCHED)
        return True

    def num_stored_now(self, source: Tier) -> int:
        """Blocks of `source` that stores under way read. Stores to a tier that `is_outside` do not count, because the
        index will not find their copies."""
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
        """Process a completion, which may be early, late or repeated. Returns the jobs that it settles, in order."""
        job, outcome = self.unsettled.get(completion.job_id), completion.outcome
        if job is None or job.parked is not None:
            self.num_late += 1
            if job is None and outcome is not UNPROVEN and completion.job_id in self.quarantined:
                plan = self.quarantined.pop(completion.job_id).plan
                self.tiers[plan.destination].end_quarantine(plan.destination_ids)
            return []
        if job.state is not JOB_LAUNCHED:
            require(job, "settle", JOB_LAUNCHED)
        plan = job.plan
        if outcome is UNPROVEN and not TIERS[plan.destination].leaves_doubt:
            outcome = FAILED  # what may still arrive proves itself: no block is in doubt here
            completion = attrs.evolve(completion, outcome=outcome)
        if completion.num_landed not in (0, len(plan.source_ids)) or completion.corrupt:
            completion = agreeing(completion, plan.num_blocks)
            outcome = completion.outcome
        before = job.predecessor
        if before is not None and not before.is_settled and outcome is not UNPROVEN:
            job.parked = completion
            if job.epoch is NoEpoch.INVALIDATED:  # a restart before the job is settled must not find its blocks
                self.tiers[plan.destination].invalidated(plan.destination_ids)
            return []
        self._close(job, completion)
        return [job, *self._close_followers(job)] if job.followers else [job]

    def discard(self, job: Job) -> list[Job]:
        """Give up a queued job. Returns the jobs settled by that: `job`, and followers that were parked."""
        self._close(job, None)
        return [job, *self._close_followers(job)]

    def end_claims(self, jobs: Iterable[Job]) -> list[Callable[[], object]]:
        """End the claims on `jobs`, which are settled, and the loads that have no job left. Returns the callbacks to
        call once the wait queue is served."""
        over: list[Load] = []
        is_corrupt = False
        for job in jobs:
            for load in job.claims:
                if load.job_settled is not None:
                    load.job_settled(job)
                load.jobs.discard(job)
                if not load.jobs:
                    over.append(load)
            job.claims.clear()
            if job.completion is not None and job.completion.outcome is CORRUPT:
                is_corrupt = True
        if is_corrupt:  # cached blocks were withdrawn
            for hook in self.hooks.on_withdrawn:
                hook()
        if len(over) > 1:
            over.sort(key=_ticket)
        wakes: list[Callable[[], object]] = []
        for load in over:
            wakes += load.conclude()
        return wakes

    def abandon(self, load: Load) -> list[Job]:
        """End the claims of `load`, and discard its queued jobs that no other load claims. Returns the jobs settled by
        that. The caller ends the load."""
        settled: list[Job] = []
        for job in sorted(load.jobs, key=lambda job: -job.job_id):
            job.claims.pop(load, None)
            if not job.claims and job.state is JOB_QUEUED and job.plan.direction is LOAD:
                settled += self.discard(job)
        load.jobs.clear()
        return settled

    def _close_followers(self, job: Job) -> list[Job]:
        """Close the parked followers of `job`, and theirs; returns them in order. The other followers get the
        predecessor of `job` as theirs, so that no chain breaks.

        A loop, not recursion: if copies end in reverse order, all launched jobs may be parked, one after another."""
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

    def _close(self, job: Job, completion: Completion | None) -> None:
        """Publish what is proven, free or quarantine the other destination blocks, and release the leases. Without a
        `completion`, the job was never launched."""
        plan, outcome = job.plan, None if completion is None else completion.outcome
        source, destination = self.tiers[plan.source], self.tiers[plan.destination]
        is_unproven, proven_stop = outcome is UNPROVEN, job.start
        # The job is settled from here on: no part may keep it as `incoming`.
        if completion is None:
            self.moves.job(job, JOB_DISCARDED)
        else:
            job.completion = completion
            width = self.cache.layout.components[job.component].width
            num_proven = job.stop - job.start if outcome is LANDED else completion.num_landed // width
            if job.epoch == self.cache.epoch and not is_unproven:
                proven_stop += num_proven
        if job.destination_lease is not None:
            self._land(job, proven_stop, keep_ids=is_unproven)
        elif not is_unproven:
            destination.unhold(plan.destination_ids)
        if is_unproven:
            self.quarantined[plan.job_id] = job
            destination.quarantine(plan.destination_ids)
        if completion is not None:
            # A corrupt store damages only its destination: requests compute with its source. A tier that the index does
            # not know forgets corrupt blocks by itself.
            is_bad = outcome is CORRUPT and plan.direction is LOAD and job.source_lease is not None
            if is_bad and job.run.epoch == self.cache.epoch:
                self._forget_corrupt(job, completion)
            if outcome is LANDED:
                self.moves.job(job, JOB_COMPLETED, "landed")
            else:
                self.moves.job(job, JOB_FAILED, completion.outcome.value)
        del self.unsettled[plan.job_id]
        if plan.source < plan.destination and not destination.is_outside:
            self._num_stored[plan.source] -= len(plan.source_ids)
        if job.source_lease is not None:
            self.cache.release(job.source_lease)
        if job.destination_lease is not None:
            self.cache.release(job.destination_lease)
        if job.source_lease is None:
            source.unhold(plan.source_ids)
        for hook in self.hooks.on_job_settled:
            hook(job)

    def _land(self, job: Job, proven_stop: int, *, keep_ids: bool) -> None:
        """Publish the blocks before unit `proven_stop` on the job's own runs, in prefix order. Free the others unless
        `keep_ids`."""
        tier, ids = self.tiers[job.plan.destination], job.plan.destination_ids
        manager, place = self.cache.managers[job.component], job.run.place(job.plan.destination, job.component)
        width = manager.component.width
        for run, first, stop in stretches(job.run, job.start, job.stop):
            part, last = run.parts[place], min(stop, proven_stop)
            brought = ids[(first - job.start) * width : (stop - job.start) * width]
            if first < last:
                held = (part.first, part.stop)
                brought = manager.enter(part, first, last, brought)
                tier.part_changed(part, *held)
            if brought and not keep_ids:
                if job.epoch is NoEpoch.INVALIDATED:
                    tier.invalidated(brought)
                tier.pool.give(brought)
            if part.incoming is job:
                # The nearest predecessor that still adds to the part, if there is one.
                before = job.predecessor
                while before is not None and not brings(before, run):
                    before = before.predecessor
                part.incoming = before

    def _forget_corrupt(self, job: Job, completion: Completion) -> None:
        """Make the corrupt source units misses; the units around them stay."""
        width = self.cache.layout.components[job.component].width
        left_out = job.num_left_out(width)
        bad = {
            job.start + (left_out + index) // width for index in completion.corrupt if 0 <= index < job.plan.num_blocks
        }
        for position in sorted(bad):
            for run, _, _ in stretches(job.run, position, position + 1):
                part = run.part(job.plan.source, job.component)
                if part.first <= position < part.stop:
                    self.cache.forget(part, position)


@dataclass(slots=True, eq=False)
class Stores:
    """Plans the stores of one link, such as device to host. Best effort: a store never waits for free blocks. Units for
    which `destination` has no free block are skipped, and a later offer of the same path tries them again."""

    cache: PrefixCache
    jobs: JobBook
    moves: Moves
    source: Tier
    destination: Tier
    window_interval: int = 0
    """Windows are also stored at every multiple of this number of units. 0: at none."""

    def checkpoints(self, first: int, stop: int) -> range:
        """The multiples of `window_interval` after unit `first`, up to unit `stop`."""
        interval = self.window_interval
        return range((first // interval + 1) * interval, stop + 1, interval) if interval else range(0)

    def offer(
        self,
        request: LedgerRequest | None,
        run: Run,
        component: Component,
        start: int,
        stop: int,
        *,
        most: int = NO_LIMIT,
    ) -> list[Job]:
        """Store the units `[start, stop)` of the path of `run` that `source` holds and `destination` lacks; in full
        attention also those before `start`, as far as units are missing. At most `most` blocks. `request` is None for a
        write-back."""
        missing = self.missing(run, component, start, stop)
        return self.store_missing(request, component, missing, most) if missing else []

    def missing(self, run: Run, component: Component, start: int, stop: int) -> list[Stretch]:
        """The units that `offer` stores, the last ones first. Empty if `destination` or `component` has no blocks."""
        if not self.cache.tiers[self.destination].pool.num_blocks or not component.width:
            return []
        return self.cache.managers[component.number].lacking(run, self.source, self.destination, start, stop)

    def store_missing(
        self, request: LedgerRequest | None, component: Component, missing: list[Stretch], most: int = NO_LIMIT
    ) -> list[Job]:
        """Store the units in `missing` (see the method `missing`), at most `most` blocks."""
        jobs: list[Job] = []
        for pieces in _contiguous(missing):
            jobs += self.store(request, component, pieces, most=left_of(most, jobs))
        return jobs

    def offer_with_windows(
        self, request: LedgerRequest, run: Run, first: int, stop: int, *, most: int = NO_LIMIT
    ) -> list[Job]:
        """Store the blocks that a hit at unit `stop`, or slightly before it, needs: full attention as in `offer`, each
        window with its margin, and all checkpoints."""
        jobs = self.offer(request, run, self.cache.layout.full, first, stop, most=most)
        for component in self.cache.layout.windows:
            start = first_stored(component, self.last_end(request, stop))
            jobs += self.offer(request, run, component, start, stop, most=left_of(most, jobs))
        return jobs + self.offer_checkpoints(request, run, 0, stop, most=left_of(most, jobs))

    def offer_checkpoints(
        self, request: LedgerRequest | None, run: Run, start: int, stop: int, *, most: int = NO_LIMIT
    ) -> list[Job]:
        """Store the checkpoints of units `[start, stop)` on the path of `run`, each by itself, without a margin."""
        recurrent = self.cache.layout.recurrent
        return [] if recurrent is None else self.offer(request, run, recurrent, start, stop, most=most)

    def last_end(self, request: LedgerRequest, stop: int) -> int:
        """The last unit that a repeated request could hit: one token short, rounded down to its `hit_alignment`."""
        most = min(stop, (request.sequence.num_tokens - 1) // self.cache.layout.unit_tokens)
        return most - most % request.hit_alignment

    def store(
        self,
        request: LedgerRequest | None,
        component: Component,
        pieces: list[Stretch],
        source_ids: array[int] | None = None,
        most: int = NO_LIMIT,
        units_per_job: Sequence[int] = (),
        payloads: Sequence[object] = (),
    ) -> list[Job]:
        """Copy `pieces`, at most `most` blocks, and no more than `destination` can take. `source_ids`, `units_per_job`
        and `payloads`: see `JobBook.plan`."""
        # The path is pinned before blocks are taken, because the store must not evict the prefix of its own units. The
        # last job takes the pin over if it ends where the pin does.
        there, (_, start, _), (end, _, stop) = self.cache.tiers[self.destination], pieces[0], pieces[-1]
        layout = self.cache.layout
        pin = self.cache.lease(self.destination, end, layout.starts_of(layout.full, 0, end.stop))
        wanted, fit, allowed = stop - start, there.num_available // component.width, most // component.width
        num_units = min(wanted, fit, allowed)
        granted = num_units
        for ask in self.jobs.hooks.ask_take:
            granted = min(granted, ask(self.destination, end, component, granted))
        units = self.cache.managers[component.number].fitting(start, stop, granted)
        jobs: list[Job] = []
        is_pin_taken = False
        if units:
            blocks = self.cache.take(self.destination, len(units) * component.width)
            run = self.cache.cut(pin.run, units.stop)
            if source_ids is not None:
                source_ids = source_ids[
                    (units.start - start) * component.width : (units.stop - start) * component.width
                ]
            is_pin_taken = run is pin.run and not component.number
            jobs = self.jobs.plan(
                request, self.source, self.destination, run, component, units.start, units.stop, blocks, units_per_job,
                source_ids, pin if is_pin_taken else None, payloads,
            )  # fmt: skip
        if fit < wanted:
            reason = f"{self.destination.name.lower()}_full"
            self.moves.note(StoreSkipped(request, (wanted - fit) * component.width, reason))
        if granted < num_units:
            self.moves.note(StoreSkipped(request, (num_units - granted) * component.width, "refused"))
        if not is_pin_taken:
            self.cache.release(pin)
        return jobs


def _ticket(load: Load) -> int:
    return load.ticket


def left_of(most: int, jobs: list[Job]) -> int:
    """The limit of `most` blocks without the blocks of `jobs`."""
    return most if most == NO_LIMIT else most - sum(job.plan.num_blocks for job in jobs)


def first_stored(component: Component, end: int) -> int:
    """The first unit of a window component that is stored for a hit that ends at unit `end`. There is a margin, because
    the next turn of a conversation may match somewhat earlier."""
    needed = component.first_unit(end)
    return max(0, needed - component.margin(end - needed))


def needed_at(component: Component, ends: Iterable[int]) -> list[range]:
    """The units of a window component that hits need that end at `ends`. Ranges that touch are joined, because the
    windows of close ends overlap, and there may be as many ends as units."""
    found: list[range] = []
    for end in sorted(ends):
        start = component.first_unit(end)
        if found and start <= found[-1].stop:
            found[-1] = range(found[-1].start, end)
        else:
            found.append(range(start, end))
    return found


def _contiguous(found: list[Stretch]) -> Iterator[list[Stretch]]:
    """Group stretches, given last first, into lists without gaps, in prefix order."""
    together: list[Stretch] = []
    for stretch in reversed(found):
        if together and together[-1][2] != stretch[1]:
            yield together
            together = []
        together.append(stretch)
    if together:
        yield together

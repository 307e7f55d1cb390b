"""Loads: which jobs a request waits for, some shared with other requests, and what it does when they are over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .._arguments import check_int
from .._extensions.load_choice import Loadable
from .._extensions.overlap import compare, compare_job
from ..errors import WrongState
from .cache import PrefixCache
from .events import Moves
from .index import accepted, covered, held_ids, held_stop, jobs_bringing, jobs_into, present_stop, stretches
from .jobs import JobBook
from .layout import Band, outside
from .leases import RequestLeases, slide_off, step_back
from .plans import TransferPlan
from .records import NO_LIMIT, BlockTable, Job, Load, Run
from .requests import LedgerRequest, Waiter, nobody
from .states import BELOW, HIT_TIERS, Computing, Tier, require
from .states import RequestState as State
from .waiting import Admission, is_waiting

__all__ = ["Loads", "has_holes", "require_no_holes"]


@dataclass(slots=True, eq=False)
class Loads:
    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    jobs: JobBook
    admission: Admission

    def plan(
        self,
        request: LedgerRequest,
        max_tokens: object = None,
        wake: Callable[[], object] = nobody,
        units_per_job: Sequence[int] = (),
    ) -> tuple[TransferPlan, ...]:
        """Start loading the host hit onto the device; see `Ledger.plan_load`."""
        require(request, "load", State.ALLOCATED, State.LOADING, State.DRAINING, State.REQUEUED, State.RUNNING)
        limit = NO_LIMIT
        if max_tokens is not None:
            limit = check_int("max_tokens", max_tokens, 0) // self.cache.layout.unit_tokens
        if request.state is State.RUNNING:
            if self.lost_to_reset(request):
                self._requeue(request, Load(request.published, wake), request.published)
            return ()
        load = request.load
        if load is not None:  # called again after a cancelled call
            load.wake_by(wake)
            return ()
        if request.waiter is not None:
            if request.state is not State.REQUEUED:
                raise is_waiting(request, "load")
            request.waiter.wake = wake
            return ()
        if request.num_steps:
            raise WrongState(f"load: a step touches the blocks of {request}, and a load gives some of them back")
        if request.last_step:  # a forward in vain: it may still write to the blocks that the load gets
            for table in request.tables:
                self.cache.last_uses.gave_up(request, table.ids)
        if request.published and request.epoch != self.cache.epoch:  # a device hit from before a reset
            request.began_load(Load(request.published, wake))
            self.moves.request(request, State.LOADING)
            self.conclude_all([request])
            return ()
        may_load = request.epoch == self.cache.epoch and BELOW in request.leases
        stop = min(request.hit_stop, request.num_units, limit) if may_load else 0
        jobs = self.start(request, stop, wake, units_per_job) if stop > request.published else []
        # Holes but nothing to load: a load without jobs is concluded at once, and fills them.
        if request.load is None and has_holes(request):
            request.began_load(Load(request.published, wake))
        if request.load is None:
            self.request_leases.end_host_lease(request)
            self.moves.request(request, State.RUNNING)
            return ()
        self.moves.request(request, State.LOADING)
        if not request.load.jobs:
            self.conclude_all([request])
        return tuple([job.plan for job in jobs])

    def lost_to_reset(self, request: LedgerRequest) -> bool:
        """See `Ledger.lost_to_reset`."""
        return (
            request.epoch != self.cache.epoch
            and request.state is State.RUNNING
            and 0 < request.ready_stop * self.cache.layout.unit_tokens == request.num_computed_tokens
            and request.computing is not Computing.ITS_BLOCKS
            and request.waiter is None
        )

    def loadable(self, request: LedgerRequest, max_tokens: object) -> Loadable | None:
        """What `plan` would load. None: nothing, or it was planned before."""
        layout, start, stop = self.cache.layout, request.published, request.hit_stop
        if max_tokens is not None or stop > request.num_units:
            limit = NO_LIMIT if max_tokens is None else check_int("max_tokens", max_tokens, 0) // layout.unit_tokens
            stop = min(stop, request.num_units, limit)
        lease = request.leases.get(BELOW)
        if stop <= start or lease is None or request.state is not State.ALLOCATED or request.epoch != self.cache.epoch:
            return None
        if request.num_steps or request.waiter is not None:
            return None  # `plan` refuses it
        run, there = lease.run, start
        part = run.parts[Tier.DEVICE]
        if part.incoming is not None or part.stop > start or run.start > start:  # else the device has nothing of it
            there = min(self.on_its_way(run.whole_path(), start, stop)[1], stop)
        return Loadable(start, stop, layout.num_blocks(there, start, stop))

    def start(
        self, request: LedgerRequest, stop: int, wake: Callable[[], object], units_per_job: Sequence[int] = ()
    ) -> list[Job]:
        """Start to bring units `[published, stop)` onto the device. The load adopts what is on the device by now, waits
        for the jobs under way that bring more, and plans jobs for the rest. Only the new jobs write into the request's
        own blocks; its blocks for all other units are given back. Returns the new jobs.

        Starts nothing (`request.load` stays None) if a block found corrupt has cut off the hit, or if there is no room
        for the window blocks that the load needs."""
        layout, start = self.cache.layout, request.published
        path = request.leases[BELOW].run.whole_path()
        shared, on_its_way = self.on_its_way(path, start, stop)
        if layout.full.width:
            stop = present_stop(path, BELOW, on_its_way, stop)
        if layout.windows:
            stop = accepted(layout, path, stop, HIT_TIERS)
        if stop <= start:
            return []
        before = request.device_run if layout.windows else None
        # First, as filling the windows may evict, but not what the load adopts: what the jobs publish is pinned as soon
        # as it lands, and the present windows stay pinned, which are needed if the load fails.
        self.request_leases.follow(request, self.cache.cut(path[-1], stop))
        if layout.windows and not self._fill_windows(request, stop):
            self.request_leases.follow(request, before)
            return []
        load = Load(stop, wake, units_per_job=units_per_job)
        request.began_load(load)
        on_its_way = min(on_its_way, stop)
        new = self._launch(request, load, layout.full, on_its_way, stop)
        if start < on_its_way:
            self._give_up(request, layout.full, start, on_its_way)
        for band in layout.windows:
            first = max(start, band.first_unit(stop))
            shared += self._bring_window(request, load, band, first, new)
        for job in (*shared, *new):
            if job.start < stop:
                job.claimed_by(request)
                load.jobs.add(job)
        return new

    def _fill_windows(self, request: LedgerRequest, stop: int) -> bool:
        """Give the window tables blocks where a load up to `stop` writes. The tables were made for a load of the whole
        hit; a shorter one needs blocks at earlier positions. False: no room, and nothing is taken."""
        wanted: list[tuple[BlockTable, int, int]] = []
        for band in self.cache.layout.windows:
            table, first = request.tables[band.number], max(request.published, band.first_unit(stop))
            if number := table.num_null(first, stop):
                wanted.append((table, first, number))
        if sum([number for _, _, number in wanted]) > self.admission.num_available:
            return False
        for table, first, number in wanted:
            table.fill(first, stop, self.cache.take(Tier.DEVICE, number))
        return True

    def on_its_way(self, path: list[Run], start: int, stop: int) -> tuple[list[Job], int]:
        """How far the device has, or will have, full attention from unit `start` on: the jobs under way that bring some
        of it, and the unit where what it holds and these jobs bring ends."""
        if not self.cache.layout.full.width:
            return [], stop
        there, last = present_stop(path, Tier.DEVICE, start, stop), path[-1]
        if last.start <= there and last.parts[Tier.DEVICE].incoming is None:  # the common case
            return [], there
        return jobs_bringing(stretches(last, there, stop), Tier.DEVICE, there)

    def _launch(self, request: LedgerRequest, load: Load, band: Band, start: int, stop: int) -> list[Job]:
        """Plan jobs that load units `[start, stop)` into blocks of the request, which the jobs own from now on."""
        if start >= stop or not band.width:
            return []
        run, table = request.leases[Tier.DEVICE].run, request.tables[band.number]
        ids = table.take(start, stop)
        return self.jobs.plan(request, BELOW, Tier.DEVICE, run, band, start, stop, ids, load.units_per_job)

    def _give_up(self, request: LedgerRequest, band: Band, start: int, stop: int) -> None:
        """Free the request's blocks for units `[start, stop)`, which other jobs bring or have brought."""
        if start < stop:
            self.cache.give(Tier.DEVICE, request.tables[band.number].null(start, stop))

    def _bring_window(self, request: LedgerRequest, load: Load, band: Band, start: int, new: list[Job]) -> list[Job]:
        """Bring the units of a window band from `start` on. Adds its jobs to `new`; returns the shared jobs."""
        run = request.leases[Tier.DEVICE].run
        shared: dict[Job, None] = {}
        missing: list[range] = []
        place = run.place(Tier.DEVICE, band.number)
        for over, begin, end in stretches(run, start, load.stop):
            part = over.parts[place]
            first, stop = covered(part)
            if part.incoming is not None:
                shared.update(dict.fromkeys(jobs_into(part)))
            if first < stop:
                self._give_up(request, band, max(first, begin), min(stop, end))
            for units in outside(first, stop, begin, end):
                if missing and missing[-1].stop == units.start:
                    missing[-1] = range(missing[-1].start, units.stop)
                else:
                    missing.append(units)
        for units in missing:
            new += self._launch(request, load, band, units.start, units.stop)
        return list(shared)

    def _conclude(self, request: LedgerRequest, load: Load) -> None:
        """End a load with the tokens that are on the device: RUNNING. If there are no free blocks for the missing ones,
        or if the device hit is from before a reset, the request gives up all its blocks and waits in the queue, at its
        old place: REQUEUED, or DRAINING while a step still uses the blocks."""
        layout = self.cache.layout
        start, run = request.published, request.device_run
        if start and request.epoch != self.cache.epoch:  # a device hit from before a reset
            if request.overlap is not None:
                compare(self.moves, request, layout.bands)
            request.num_lost_tokens += (load.stop - start) * layout.unit_tokens
            self._requeue(request, load, start)
            return
        ready = start  # after a reset, nothing: others may have published KV of before it on the same path
        if request.epoch == self.cache.epoch:
            path = [] if run is None else run.whole_path()
            ready = max(start, held_stop(layout, path, Tier.DEVICE, start, load.stop))
        missing: list[int] = []
        for table, band in zip(request.tables, layout.bands, strict=True):
            first = max(start, band.first_unit(ready)) if band.number else start
            if table.width:
                if start < first:
                    self.cache.give(Tier.DEVICE, table.null(start, first))
                ids = held_ids(run, Tier.DEVICE, band.number, first, ready)
                if band.number:
                    self.cache.give(Tier.DEVICE, table.exchange(first, ids))
                else:
                    table.put(first, ids)  # null until now: `start` gave all of it to jobs, or back
            missing.append(table.num_null(ready, request.num_units))
        request.published = request.ready_stop = ready
        request.num_computed_tokens = ready * layout.unit_tokens
        if request.overlap is not None:
            compare(self.moves, request, layout.bands)
        if ready < load.stop:
            request.num_lost_tokens += (load.stop - ready) * layout.unit_tokens
            step_back(self.request_leases, request, ready)
        self.request_leases.end_host_lease(request)
        if layout.windows:
            slide_off(self.cache, request)
        if any(missing) and sum(missing) > self.admission.num_available:
            self._requeue(request, load, ready)
            return
        for table, number in zip(request.tables, missing, strict=True):
            if number:
                table.fill(ready, request.num_units, self.cache.take(Tier.DEVICE, number))
        request.ended_load()
        self.moves.request(request, State.RUNNING)

    def _requeue(self, request: LedgerRequest, load: Load, ready: int) -> None:
        """Give up all blocks and wait in the line. Not during a step, which writes to them: the load is concluded again
        when the step ends."""
        if request.num_steps:
            load.shorten(ready)
            if request.state is State.LOADING:
                self.moves.request(request, State.DRAINING)
            return
        num_units = request.num_units
        self.request_leases.let_go(request)
        self.moves.request(request, State.REQUEUED)
        self.admission.wait_for_allocation(Waiter(request, num_units, load.wake))

    def conclude_all(self, requests: Iterable[LedgerRequest]) -> list[Callable[[], object]]:
        """End the loads of `requests`; returns the callbacks to call after the line is served."""
        wakes: list[Callable[[], object]] = []
        for request in requests:
            load = request.load
            assert load is not None
            self._conclude(request, load)
            if request.state is State.RUNNING:
                wakes.append(load.wake)
        return wakes

    def abandon(self, request: LedgerRequest) -> list[Job]:
        """Stop waiting for the load, and discard its queued jobs that no other request waits for. Returns the jobs
        settled by that."""
        settled: list[Job] = []
        if request.load is not None:
            for job in sorted(request.load.jobs, key=lambda job: -job.job_id):
                if self.jobs.unclaim(job, request):
                    settled += self.jobs.discard(job)
            request.load.jobs.clear()
        return settled

    def settled(self, jobs: list[Job]) -> list[LedgerRequest]:
        """Tell the loads that wait for `jobs` that these are settled. Returns the requests whose load is over, by
        ticket."""
        over: set[LedgerRequest] = set()
        for job in jobs:
            for request in job.claims:
                assert isinstance(request, LedgerRequest)
                if request.overlap is not None:
                    compare_job(self.moves, request, job, self.cache.layout.bands[job.band])
                if request.load is not None:
                    request.load.jobs.discard(job)
                    if not request.load.jobs:
                        over.add(request)
            job.end_claims()
        return sorted(over, key=_ticket) if len(over) > 1 else list(over)


def _ticket(request: LedgerRequest) -> int:
    return request.ticket


def has_holes(request: LedgerRequest) -> bool:
    """Whether the window tables have holes: null entries that the request needs filled if nothing is loaded."""
    return any(table.num_null(max(request.published, table.start), request.num_units) for table in request.tables[1:])


def require_no_holes(request: LedgerRequest, call: str) -> None:
    """Refuse `call` while window tables have holes, since the host hit was neither loaded nor declined."""
    if request.state is State.ALLOCATED and has_holes(request):
        raise WrongState(f"{call}: load the host hit of {request} first, or decline it: load(max_tokens=0)")

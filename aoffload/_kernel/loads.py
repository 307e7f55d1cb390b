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
from .requests import Holding, Waiter, nobody
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
        holding: Holding,
        max_tokens: object = None,
        wake: Callable[[], object] = nobody,
        units_per_job: Sequence[int] = (),
    ) -> tuple[TransferPlan, ...]:
        """Start loading the host hit onto the device; see `Ledger.plan_load`."""
        require(holding, "load", State.ALLOCATED, State.LOADING, State.DRAINING, State.REQUEUED, State.RUNNING)
        limit = NO_LIMIT
        if max_tokens is not None:
            limit = check_int("max_tokens", max_tokens, 0) // self.cache.layout.unit_tokens
        if holding.state is State.RUNNING:
            if self.lost_to_reset(holding):
                self._requeue(holding, Load(holding.published, wake), holding.published)
            return ()
        load = holding.load
        if load is not None:  # called again after a cancelled call
            load.wake_by(wake)
            return ()
        if holding.waiter is not None:
            if holding.state is not State.REQUEUED:
                raise is_waiting(holding, "load")
            holding.waiter.wake_by(wake)
            return ()
        if holding.num_steps:
            raise WrongState(f"load: a step touches the blocks of {holding}, and a load gives some of them back")
        if holding.last_step:  # a forward in vain: it may still write to the blocks that the load gets
            for table in holding.tables:
                self.cache.last_uses.gave_up(holding, table.ids)
        if holding.published and holding.epoch != self.cache.epoch:  # a device hit from before a reset
            holding.began_load(Load(holding.published, wake))
            self.moves.request(holding, State.LOADING)
            self.conclude_all([holding])
            return ()
        may_load = holding.epoch == self.cache.epoch and BELOW in holding.leases
        stop = min(holding.hit_stop, holding.num_units, limit) if may_load else 0
        jobs = self.start(holding, stop, wake, units_per_job) if stop > holding.published else []
        # Holes but nothing to load: a load without jobs is concluded at once, and fills them.
        if holding.load is None and has_holes(holding):
            holding.began_load(Load(holding.published, wake))
        if holding.load is None:
            self.request_leases.end_host_lease(holding)
            self.moves.request(holding, State.RUNNING)
            return ()
        self.moves.request(holding, State.LOADING)
        if not holding.load.jobs:
            self.conclude_all([holding])
        return tuple([job.plan for job in jobs])

    def lost_to_reset(self, holding: Holding) -> bool:
        """See `Ledger.lost_to_reset`."""
        return (
            holding.epoch != self.cache.epoch
            and holding.state is State.RUNNING
            and 0 < holding.ready_stop * self.cache.layout.unit_tokens == holding.num_computed_tokens
            and holding.computing is not Computing.ITS_BLOCKS
            and holding.waiter is None
        )

    def loadable(self, holding: Holding, max_tokens: object) -> Loadable | None:
        """What `plan` would load. None: nothing, or it was planned before."""
        layout, start, stop = self.cache.layout, holding.published, holding.hit_stop
        if max_tokens is not None or stop > holding.num_units:
            limit = NO_LIMIT if max_tokens is None else check_int("max_tokens", max_tokens, 0) // layout.unit_tokens
            stop = min(stop, holding.num_units, limit)
        lease = holding.leases.get(BELOW)
        if stop <= start or lease is None or holding.state is not State.ALLOCATED or holding.epoch != self.cache.epoch:
            return None
        if holding.num_steps or holding.waiter is not None:
            return None  # `plan` refuses it
        run, there = lease.run, start
        part = run.parts[Tier.DEVICE]
        if part.incoming is not None or part.stop > start or run.start > start:  # else the device has nothing of it
            there = min(self.on_its_way(run.whole_path(), start, stop)[1], stop)
        return Loadable(start, stop, layout.num_blocks(there, start, stop))

    def start(
        self, holding: Holding, stop: int, wake: Callable[[], object], units_per_job: Sequence[int] = ()
    ) -> list[Job]:
        """Start to bring units `[published, stop)` onto the device. The load adopts what is on the device by now, waits
        for the jobs under way that bring more, and plans jobs for the rest. Only the new jobs write into the request's
        own blocks; its blocks for all other units are given back. Returns the new jobs.

        Starts nothing (`holding.load` stays None) if a block found corrupt has cut off the hit, or if there is no room
        for the window blocks that the load needs."""
        layout, start = self.cache.layout, holding.published
        path = holding.leases[BELOW].run.whole_path()
        shared, on_its_way = self.on_its_way(path, start, stop)
        if layout.full.width:
            stop = present_stop(path, BELOW, on_its_way, stop)
        if layout.windows:
            stop = accepted(layout, path, stop, HIT_TIERS)
        if stop <= start:
            return []
        before = holding.device_run if layout.windows else None
        # First, as filling the windows may evict, but not what the load adopts: what the jobs publish is pinned as soon
        # as it lands, and the present windows stay pinned, which are needed if the load fails.
        self.request_leases.follow(holding, self.cache.cut(path[-1], stop))
        if layout.windows and not self._fill_windows(holding, stop):
            self.request_leases.follow(holding, before)
            return []
        load = Load(stop, wake, units_per_job=units_per_job)
        holding.began_load(load)
        on_its_way = min(on_its_way, stop)
        new = self._launch(holding, load, layout.full, on_its_way, stop)
        if start < on_its_way:
            self._give_up(holding, layout.full, start, on_its_way)
        for band in layout.windows:
            first = max(start, band.first_unit(stop))
            shared += self._bring_window(holding, load, band, first, new)
        for job in (*shared, *new):
            if job.start < stop:
                job.claimed_by(holding)
                load.jobs.add(job)
        return new

    def _fill_windows(self, holding: Holding, stop: int) -> bool:
        """Give the window tables blocks where a load up to `stop` writes. The tables were made for a load of the whole
        hit; a shorter one needs blocks at earlier positions. False: no room, and nothing is taken."""
        wanted: list[tuple[BlockTable, int, int]] = []
        for band in self.cache.layout.windows:
            table, first = holding.tables[band.number], max(holding.published, band.first_unit(stop))
            if number := table.num_null(first, stop):
                wanted.append((table, first, number))
        if sum([number for _, _, number in wanted]) > self.admission.room:
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

    def _launch(self, holding: Holding, load: Load, band: Band, start: int, stop: int) -> list[Job]:
        """Plan jobs that load units `[start, stop)` into blocks of the request, which the jobs own from now on."""
        if start >= stop or not band.width:
            return []
        run, table = holding.leases[Tier.DEVICE].run, holding.tables[band.number]
        ids = table.take(start, stop)
        return self.jobs.plan(holding, BELOW, Tier.DEVICE, run, band, start, stop, ids, load.units_per_job)

    def _give_up(self, holding: Holding, band: Band, start: int, stop: int) -> None:
        """Free the request's blocks for units `[start, stop)`, which other jobs bring or have brought."""
        if start < stop:
            self.cache.give(Tier.DEVICE, holding.tables[band.number].null(start, stop))

    def _bring_window(self, holding: Holding, load: Load, band: Band, start: int, new: list[Job]) -> list[Job]:
        """Bring the units of a window band from `start` on. Adds its jobs to `new`; returns the shared jobs."""
        run = holding.leases[Tier.DEVICE].run
        shared: dict[Job, None] = {}
        missing: list[range] = []
        place = run.place(Tier.DEVICE, band.number)
        for over, begin, end in stretches(run, start, load.stop):
            part = over.parts[place]
            first, stop = covered(part)
            if part.incoming is not None:
                shared.update(dict.fromkeys(jobs_into(part)))
            if first < stop:
                self._give_up(holding, band, max(first, begin), min(stop, end))
            for units in outside(first, stop, begin, end):
                if missing and missing[-1].stop == units.start:
                    missing[-1] = range(missing[-1].start, units.stop)
                else:
                    missing.append(units)
        for units in missing:
            new += self._launch(holding, load, band, units.start, units.stop)
        return list(shared)

    def _conclude(self, holding: Holding, load: Load) -> None:
        """End a load with the tokens that are on the device: RUNNING. If there are no free blocks for the missing ones,
        or if the device hit is from before a reset, the request gives up all its blocks and waits in the queue, at its
        old place: REQUEUED, or DRAINING while a step still uses the blocks."""
        layout = self.cache.layout
        start, run = holding.published, holding.device_run
        if start and holding.epoch != self.cache.epoch:  # a device hit from before a reset
            if holding.overlap is not None:
                compare(self.moves, holding, layout.bands)
            holding.lost((load.stop - start) * layout.unit_tokens)
            self._requeue(holding, load, start)
            return
        ready = start  # after a reset, nothing: others may have published KV of before it on the same path
        if holding.epoch == self.cache.epoch:
            path = [] if run is None else run.whole_path()
            ready = max(start, held_stop(layout, path, Tier.DEVICE, start, load.stop))
        missing: list[int] = []
        for table, band in zip(holding.tables, layout.bands, strict=True):
            first = max(start, band.first_unit(ready)) if band.number else start
            if table.width:
                if start < first:
                    self.cache.give(Tier.DEVICE, table.null(start, first))
                ids = held_ids(run, Tier.DEVICE, band.number, first, ready)
                if band.number:
                    self.cache.give(Tier.DEVICE, table.exchange(first, ids))
                else:
                    table.put(first, ids)  # null until now: `start` gave all of it to jobs, or back
            missing.append(table.num_null(ready, holding.num_units))
        holding.ready_up_to(ready, ready * layout.unit_tokens)
        if holding.overlap is not None:
            compare(self.moves, holding, layout.bands)
        if ready < load.stop:
            holding.lost((load.stop - ready) * layout.unit_tokens)
            step_back(self.request_leases, holding, ready)
        self.request_leases.end_host_lease(holding)
        if layout.windows:
            slide_off(self.cache, holding)
        if any(missing) and sum(missing) > self.admission.room:
            self._requeue(holding, load, ready)
            return
        for table, number in zip(holding.tables, missing, strict=True):
            if number:
                table.fill(ready, holding.num_units, self.cache.take(Tier.DEVICE, number))
        holding.ended_load()
        self.moves.request(holding, State.RUNNING)

    def _requeue(self, holding: Holding, load: Load, ready: int) -> None:
        """Give up all blocks and wait in the line. Not during a step, which writes to them: the load is concluded again
        when the step ends."""
        if holding.num_steps:
            load.shorten(ready)
            if holding.state is State.LOADING:
                self.moves.request(holding, State.DRAINING)
            return
        num_units = holding.num_units
        self.request_leases.let_go(holding)
        self.moves.request(holding, State.REQUEUED)
        self.admission.wait_for_allocation(Waiter(holding, num_units, load.wake))

    def conclude_all(self, holdings: Iterable[Holding]) -> list[Callable[[], object]]:
        """End the loads of `holdings`; returns the callbacks to call after the line is served."""
        wakes: list[Callable[[], object]] = []
        for holding in holdings:
            load = holding.load
            assert load is not None
            self._conclude(holding, load)
            if holding.state is State.RUNNING:
                wakes.append(load.wake)
        return wakes

    def abandon(self, holding: Holding) -> list[Job]:
        """Stop waiting for the load, and discard its queued jobs that no other request waits for. Returns the jobs
        settled by that."""
        settled: list[Job] = []
        if holding.load is not None:
            for job in sorted(holding.load.jobs, key=lambda job: -job.job_id):
                if self.jobs.unclaim(job, holding):
                    settled += self.jobs.discard(job)
            holding.load.jobs.clear()
        return settled

    def settled(self, jobs: list[Job]) -> list[Holding]:
        """Tell the loads that wait for `jobs` that these are settled. Returns the holdings whose load is over, by
        ticket."""
        over: set[Holding] = set()
        for job in jobs:
            for holding in job.claims:
                assert isinstance(holding, Holding)
                if holding.overlap is not None:
                    compare_job(self.moves, holding, job, self.cache.layout.bands[job.band])
                if holding.load is not None:
                    holding.load.jobs.discard(job)
                    if not holding.load.jobs:
                        over.add(holding)
            job.end_claims()
        return sorted(over, key=_ticket) if len(over) > 1 else list(over)


def _ticket(holding: Holding) -> int:
    return holding.ticket


def has_holes(holding: Holding) -> bool:
    """Whether the window tables have holes: null entries that the request needs filled if nothing is loaded."""
    return any(table.num_null(max(holding.published, table.start), holding.num_units) for table in holding.tables[1:])


def require_no_holes(holding: Holding, call: str) -> None:
    """Refuse `call` while window tables have holes, since the host hit was neither loaded nor declined."""
    if holding.state is State.ALLOCATED and has_holes(holding):
        raise WrongState(f"{call}: load the host hit of {holding} first, or decline it: load(max_tokens=0)")

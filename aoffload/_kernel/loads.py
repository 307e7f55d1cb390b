"""Loads: bring the host hit of a request onto the device, and decide what follows once the copies are over.

What a load does with the units of the hit, in full attention:

    published                                                          stop
    |------ adopted -------|------- shared --------|------ planned ------|
      on the device since    a job of another load   new jobs copy them
      the match: another     brings them: this load  into the request's
      request published them claims that job, too    own blocks

The request has blocks for all these units already. Its blocks for adopted and shared units go back at once. Its blocks
for planned units belong to the new jobs, and its table is null there until the load ends. A window component needs only
the units of the window before `stop`, where the three kinds may lie in any order. Of a recurrent state, the load needs
the checkpoint at `stop`, which is of one of the three kinds; the request has blocks for one (`Checkpoints.incoming`).

The device lease of the request moves to `stop` before anything is planned, so that everything a job publishes is pinned
as it lands. The host lease stays until the load ends.

The end. A settled job leaves every load that claims it (`JobBook.end_claims`). A load without jobs is over. It calls
its callback `conclude`, which says what follows; for a request that is `Loads._conclude`.

A request goes on with the units that the device holds then, in every component. Neither the plan nor a completion
decides that: a copy may have landed, and yet have published nothing, because its predecessor failed. If the load falls
short, the request computes the rest and needs blocks for it. If there are too few free blocks, the request gives up all
its blocks and waits in the wait queue, at its old place: REQUEUED. It does not wait while it holds blocks, because two
such requests could wait for each other for ever. When it gets blocks again, it takes the device hit and loads nothing
(`RequestLeases`): otherwise two requests whose loads keep failing could take turns for ever.

After a reset, no request begins to compute with KV from before the reset. Jobs planned before it publish nothing, so a
load under way ends with no tokens. A request with a device hit from before the reset gives up all its blocks: REQUEUED.
So does a request whose load was over, if its caller does not know that yet (`lost_to_reset`).

A step may overlap the load. Its blocks cannot be given up before it ends: a request that should be REQUEUED is DRAINING
until then, and the end of the step calls `conclude` again.

A load is abandoned (`JobBook.abandon`) when its request stops waiting. Its queued jobs that no other load claims are
discarded. Launched jobs go on and publish what they bring.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from .._common.arguments import check_int
from .._common.tiers import BELOW, DEVICE, HIT_TIERS
from ..errors import WrongState
from .cache import PrefixCache
from .hooks import Hooks
from .index import accepted, covered, held_ids, held_stop, jobs_bringing, jobs_into, present_stop, stretches
from .jobs import JobBook
from .layout import Component, outside
from .leases import RequestLeases, checkpoint_ids, slide_windows, step_back
from .moves import Moves
from .plans import TransferPlan
from .records import NO_LIMIT, BlockTable, Job, LedgerRequest, Load, Run, Waiter, do_nothing
from .states import ALLOCATED, COMPUTES_ITS_BLOCKS, DRAINING, LOADING, REQUEUED, RUNNING, require
from .waiting import Admission, waiting_error


@dataclass(slots=True, eq=False)
class Loads:
    """Begins, ends and abandons the loads of requests."""

    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    jobs: JobBook
    admission: Admission
    hooks: Hooks

    def plan(
        self,
        request: LedgerRequest,
        max_tokens: object = None,
        wake: Callable[[], object] = do_nothing,
        units_per_job: Sequence[int] = (),
    ) -> tuple[TransferPlan, ...]:
        """Start loading the host hit onto the device; see `Ledger.plan_load`."""
        if request.state is not ALLOCATED:  # which is the common case, and needs no check
            require(request, "load", ALLOCATED, LOADING, DRAINING, REQUEUED, RUNNING)
        limit = NO_LIMIT
        if max_tokens is not None:
            limit = check_int("max_tokens", max_tokens, 0) // self.cache.layout.unit_tokens
        if request.state is RUNNING:
            if self.lost_to_reset(request):
                self._requeue(request, request.published, wake)
            return ()
        pending = request.load
        if pending is not None:  # an earlier call has planned it, and its caller has stopped waiting
            pending.wake = wake
            return ()
        if request.waiter is not None:
            if request.state is not REQUEUED:
                raise waiting_error(request, "load")
            request.waiter.wake = wake
            return ()
        if request.num_steps:
            raise WrongState(f"load: a step uses the blocks of {request}, but a load may release some of them")
        if request.last_step:  # a step whose results were not committed: it may still write to blocks of the load
            for table in request.tables:
                self.cache.last_uses.gave_up(request, table.ids)
        is_current, jobs, stop = request.epoch == self.cache.epoch, [], 0
        if is_current and BELOW in request.leases:
            stop = min(request.hit_stop, request.num_units, limit)
        for ask in self.hooks.ask_load_stop:
            stop = min(stop, ask(request, stop))
        if stop > request.published:
            jobs = self.start(request, stop, wake, partial(self._conclude, request), units_per_job)
        load = request.load
        if load is None and (has_holes(request) or (request.published and not is_current)):
            # A load without jobs, which `_conclude` ends below: that fills the holes in the window tables, or gives up
            # a device hit from before a reset.
            request.load = load = Load(request.published, wake, partial(self._conclude, request), request.ticket)
        if load is None:
            self.request_leases.end_host_lease(request)
            self.moves.request(request, RUNNING)
            return ()
        self.moves.request(request, LOADING)
        if not load.jobs:
            self._conclude(request)
        return tuple([job.plan for job in jobs])

    def lost_to_reset(self, request: LedgerRequest) -> bool:
        """See `Ledger.lost_to_reset`."""
        return (
            request.epoch != self.cache.epoch
            and request.state is RUNNING
            and 0 < request.ready_stop * self.cache.layout.unit_tokens == request.num_computed_tokens
            and request.computing is not COMPUTES_ITS_BLOCKS
            and request.waiter is None
        )

    def start(
        self,
        request: LedgerRequest,
        stop: int,
        wake: Callable[[], object],
        conclude: Callable[[], list[Callable[[], object]]],
        units_per_job: Sequence[int] = (),
    ) -> list[Job]:
        """Begin a load of units `[published, stop)`: adopt, share and plan, as the docstring of this module says.
        Returns the new jobs. `conclude`: see `Load`.

        Begins nothing (`request.load` stays None) if a block of the hit was found corrupt since the match and no unit
        is left to load, or if there are too few free blocks for the windows that the load needs."""
        layout, start = self.cache.layout, request.published
        path = request.leases[BELOW].run.whole_path()
        shared, on_its_way = self.on_its_way(path, start, stop)
        if layout.full.width:
            stop = present_stop(path, BELOW, on_its_way, stop)
        if layout.partial:
            stop = accepted(layout, path, stop, HIT_TIERS)
        if stop <= start:
            return []
        before = request.device_run
        # The lease moves before the windows are filled, because filling may evict. It must evict neither blocks that
        # the load adopts, nor the present windows, which the request needs if the load fails.
        self.request_leases.lease_device_to(request, self.cache.cut(path[-1], stop))
        if layout.windows and not self._fill_windows(request, stop):
            self.request_leases.lease_device_to(request, before)
            return []
        request.load = load = Load(stop, wake, conclude, request.ticket, units_per_job=units_per_job)
        on_its_way = min(on_its_way, stop)
        new = self._plan_units(request, load, layout.full, on_its_way, stop)
        if start < on_its_way:
            self._give_back(request, layout.full, start, on_its_way)
        for component in layout.windows:
            first = max(start, component.first_unit(stop))
            shared += self._bring_window(request, load, component, first, new)
        if layout.recurrent is not None:
            shared += self._bring_checkpoint(request, load, layout.recurrent, new)
        for job in (*shared, *new):
            if job.start < stop:
                job.claims[load] = None
                load.jobs.add(job)
        return new

    def _fill_windows(self, request: LedgerRequest, stop: int) -> bool:
        """Give the window tables blocks where a load up to `stop` writes. The tables were made for a load of the whole
        hit; a shorter load needs blocks at earlier positions. False: there are too few free blocks, and none is
        taken."""
        wanted: list[tuple[BlockTable, int, int]] = []
        for component in self.cache.layout.windows:
            table, first = request.tables[component.number], max(request.published, component.first_unit(stop))
            if number := table.num_null(first, stop):
                wanted.append((table, first, number))
        if wanted and sum([number for _, _, number in wanted]) > self.admission.num_available:
            return False
        for table, first, number in wanted:
            table.fill(first, stop, self.cache.take(DEVICE, number))
        return True

    def on_its_way(self, path: list[Run], start: int, stop: int) -> tuple[list[Job], int]:
        """The jobs under way that bring full attention to the device from unit `start` on, and the unit up to which the
        device holds all units without a gap once these jobs have landed."""
        if not self.cache.layout.full.width:
            return [], stop
        there, last = present_stop(path, DEVICE, start, stop), path[-1]
        if last.start <= there and last.parts[DEVICE].incoming is None:  # the common case
            return [], there
        return jobs_bringing(stretches(last, there, stop), DEVICE, there)

    def _plan_units(self, request: LedgerRequest, load: Load, component: Component, start: int, stop: int) -> list[Job]:
        """Plan jobs that load units `[start, stop)` into blocks of the request, which the jobs own from now on."""
        if start >= stop or not component.width:
            return []
        run, table = request.leases[DEVICE].run, request.tables[component.number]
        ids = table.take(start, stop)
        return self.jobs.plan(request, BELOW, DEVICE, run, component, start, stop, ids, load.units_per_job)

    def _give_back(self, request: LedgerRequest, component: Component, start: int, stop: int) -> None:
        """Free the request's blocks for units `[start, stop)`, which other jobs bring or have brought."""
        if start < stop:
            self.cache.give(DEVICE, request.tables[component.number].null(start, stop))

    def _bring_window(
        self, request: LedgerRequest, load: Load, component: Component, start: int, new: list[Job]
    ) -> list[Job]:
        """Adopt, share and plan the units of a window component from `start` on. Adds the planned jobs to `new`.
        Returns the shared jobs."""
        run = request.leases[DEVICE].run
        shared: dict[Job, None] = {}
        missing: list[range] = []
        place = run.place(DEVICE, component.number)
        for each, begin, end in stretches(run, start, load.stop):
            part = each.parts[place]
            first, stop = covered(part)
            if part.incoming is not None:
                shared.update(dict.fromkeys(jobs_into(part)))
            if first < stop:
                self._give_back(request, component, max(first, begin), min(stop, end))
            for units in outside(first, stop, begin, end):
                if missing and missing[-1].stop == units.start:
                    missing[-1] = range(missing[-1].start, units.stop)
                else:
                    missing.append(units)
        for units in missing:
            new += self._plan_units(request, load, component, units.start, units.stop)
        return list(shared)

    def _bring_checkpoint(
        self, request: LedgerRequest, load: Load, component: Component, new: list[Job]
    ) -> Iterable[Job]:
        """Adopt, share or plan the checkpoint at the end of the load, as `_bring_window`."""
        run, unit, checkpoints = request.leases[DEVICE].run, load.stop - 1, request.checkpoints
        assert checkpoints is not None
        part = run.part(DEVICE, component.number)
        if part.first <= unit < part.stop:
            return ()
        shared = [job for job in jobs_into(part) if job.start <= unit < job.stop]
        if not shared:
            ids, checkpoints.incoming = checkpoints.incoming, array("i")
            new += self.jobs.plan(
                request, BELOW, DEVICE, run, component, unit, load.stop, ids, load.units_per_job
            )  # fmt: skip
        return shared

    # -- the end --------------------------------------------------------------------------------------------------

    def _conclude(self, request: LedgerRequest) -> list[Callable[[], object]]:
        """End the load of `request` with the tokens that are on the device: RUNNING. If the device hit is from before a
        reset, or if there are too few free blocks for the missing units: REQUEUED, or DRAINING while a step still uses
        the blocks."""
        load, layout, start, num_units = request.load, self.cache.layout, request.published, request.num_units
        assert load is not None
        run, is_current = request.device_run, request.epoch == self.cache.epoch
        if start and not is_current:
            for hook in self.hooks.on_load_over:
                hook(request)
            request.num_lost_tokens += (load.stop - start) * layout.unit_tokens
            self._requeue(request, start, load.wake)
            return []
        ready = start  # after a reset, no unit counts: others may have published older KV on the same path
        if is_current and run is not None:
            path = [run] if run.start <= start and not layout.partial else run.whole_path()
            ready = max(start, held_stop(layout, path, DEVICE, start, load.stop))
        num_missing = 0
        for table, component in zip(request.tables, layout.paged, strict=True):
            first = max(start, component.first_unit(ready))
            if table.width and start < ready:
                if start < first:
                    self.cache.give(DEVICE, table.null(start, first))
                ids = held_ids(run, DEVICE, component.number, first, ready)
                if component.number:
                    self.cache.give(DEVICE, table.exchange(first, ids))
                else:  # null so far: these units were given back, or belong to jobs
                    table.put(first, ids)
            num_missing += table.num_null(ready, num_units)
        request.published = request.ready_stop = ready
        request.num_computed_tokens = ready * layout.unit_tokens
        for hook in self.hooks.on_load_over:
            hook(request)
        if ready < load.stop:
            request.num_lost_tokens += (load.stop - ready) * layout.unit_tokens
            step_back(self.request_leases, request, ready)
        self.request_leases.end_host_lease(request)
        if request.checkpoints is not None:
            request.checkpoints.resume = checkpoint_ids(self.cache, request, ready)
        if layout.windows:
            slide_windows(self.cache, request, after_load=True)
        if num_missing:
            if num_missing > self.admission.num_available:
                self._requeue(request, ready, load.wake)
                return []
            for table in request.tables:
                if number := table.num_null(ready, num_units):
                    table.fill(ready, num_units, self.cache.take(DEVICE, number))
        if request.checkpoints is not None and ready < load.stop:
            self.request_leases.plan_again(request)
        request.load = None
        self.moves.request(request, RUNNING)
        return [load.wake]

    def _requeue(self, request: LedgerRequest, ready: int, wake: Callable[[], object]) -> None:
        """Give up all blocks and join the wait queue: REQUEUED. During a step, which writes to the blocks: DRAINING.
        The end of the step then ends the load again, with `ready` as its end."""
        if request.num_steps:
            if request.load is not None:
                request.load.stop = ready
            if request.state is LOADING:
                self.moves.request(request, DRAINING)
            return
        num_units = request.num_units
        self.request_leases.release_all(request)
        self.moves.request(request, REQUEUED)
        self.admission.enqueue(Waiter(request, num_units, wake))


def has_holes(request: LedgerRequest) -> bool:
    """Whether the window tables have holes: null entries that must get blocks if nothing is loaded."""
    return any(table.num_null(max(request.published, table.start), request.num_units) for table in request.tables[1:])


def require_no_holes(request: LedgerRequest, call: str) -> None:
    """Refuse `call` while window tables have holes, since the host hit was neither loaded nor declined."""
    if request.state is ALLOCATED and has_holes(request):
        raise WrongState(f"{call}: load the host hit of {request} first, or decline it: load(max_tokens=0)")

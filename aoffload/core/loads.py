"""Loading: what a request waits for, shared with whoever wants the same blocks, and how it goes on afterwards."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import attrs

from ..errors import WrongState
from .admission import Admission
from .arguments import check_int
from .cache import PrefixCache
from .holding import Holding, Load
from .index import Stretch, stretches
from .jobs import Job, JobBook
from .lifecycle import Moves, RequestState, require
from .pins import Pins
from .plan import Tier, TransferPlan
from .publish import step_back
from .waiting import Waiter, nobody, require_idle

__all__ = ["Loads"]

_S = RequestState


@attrs.define(eq=False)
class Loads:
    cache: PrefixCache
    pins: Pins
    moves: Moves
    jobs: JobBook
    admission: Admission

    def plan(
        self, holding: Holding, max_tokens: int | None = None, wake: Callable[[], object] = nobody
    ) -> tuple[TransferPlan, ...]:
        """Start bringing the host hit onto the device; the plans that have to be launched for it.

        RUNNING afterwards: nothing has to be waited for. LOADING: `wake` is called when the load is over, or when room
        was granted after it had to let go of everything (`holding.waiter`: accept it and plan again).
        """
        require(holding, "load", _S.ALLOCATED, _S.LOADING, _S.RUNNING)
        limit = None if max_tokens is None else check_int("max_tokens", max_tokens, 0)
        if holding.state is _S.RUNNING:
            return ()
        if holding.load is not None:  # called again after a cancelled call
            holding.load.wake = wake
            return ()
        if holding.waiter is not None and holding.state is _S.LOADING:
            holding.waiter.wake = wake
            return ()
        require_idle(holding, "load")
        if holding.num_steps:
            raise WrongState(f"load: a step touches the blocks of {holding}, and a load gives some of them back")
        if not holding.table:
            raise WrongState(f"load: {holding} had to let go of its blocks, and they can never fit again: leave it")
        stop = self._load_stop(holding, limit)
        jobs = self._start(holding, stop, wake) if stop > holding.published else []
        if holding.load is None:
            self.pins.end_host_lease(holding)
            self.ready(holding)
            return ()
        if holding.state is _S.ALLOCATED:
            self.moves.request(holding, _S.LOADING)
        if holding.load is not None and not holding.load.jobs:
            self.conclude_all([holding])
        self.admission.pump()
        return tuple(job.plan for job in jobs)

    def _load_stop(self, holding: Holding, max_tokens: int | None) -> int:
        # Two requests whose loads fail at once would give each other room for the next try for ever.
        if holding.has_lost_load or holding.epoch != self.cache.epoch or Tier.HOST not in holding.leases:
            return 0
        stop = min(holding.hit_stop, len(holding.table) // self.cache.layout.width)
        return stop if max_tokens is None else min(stop, max_tokens // self.cache.layout.unit_tokens)

    def _start(self, holding: Holding, stop: int, wake: Callable[[], object]) -> list[Job]:
        """Bring units `[published, stop)` onto the device: adopt what is there by now, wait for what is on its way,
        launch the rest. Only what nobody brings takes blocks of the holding's own; the others are given back.

        Nothing starts (and `holding.load` stays None) if the hit is gone: a block of it turned out to be corrupt."""
        over = stretches(holding.leases[Tier.HOST].run, holding.published, stop)
        ready = _present_stop(over, Tier.DEVICE, holding.published)
        shared, on_its_way = _incoming(over, ready)
        stop = _present_stop(over, Tier.HOST, on_its_way)
        if stop == holding.published:
            return []
        self._lease_path(holding, stop)
        holding.load = Load(stop, wake)
        new = self._launch(holding, on_its_way, stop)
        self._adopt(holding, ready, stop, on_its_way)
        for job in (*shared, *new):
            job.claims[holding] = None
            holding.load.jobs.add(job)
        return new

    def _lease_path(self, holding: Holding, stop: int) -> None:
        """Pin, on the device, the path up to `stop`: what is published there from now on is pinned as it lands."""
        last = self.cache.cut(stretches(holding.leases[Tier.HOST].run, stop - 1, stop)[0].run, stop)
        device = holding.leases.get(Tier.DEVICE)
        if device is None:
            holding.leases[Tier.DEVICE] = self.cache.lease(Tier.DEVICE, last)
        else:
            self.cache.move_lease(device, last)

    def _launch(self, holding: Holding, start: int, stop: int) -> list[Job]:
        if start == stop:
            return []
        width = self.cache.layout.width
        own = holding.table[start * width : stop * width]
        run = holding.leases[Tier.DEVICE].run
        return self.jobs.plan(holding, Tier.HOST, Tier.DEVICE, run, start, stop, own)

    def _adopt(self, holding: Holding, ready: int, stop: int, on_its_way: int) -> None:
        """Enter what is ready; what others bring or have brought needs no blocks of ours; the rest is the jobs' now."""
        width = self.cache.layout.width
        start = holding.published
        self.cache.give(Tier.DEVICE, holding.table[start * width : on_its_way * width])
        holding.table[start * width : ready * width] = self.pins.ready_ids(holding, start, ready)
        holding.table[ready * width : stop * width] = array("i", bytes(4 * (stop - ready) * width))
        holding.published = holding.ready_stop = ready

    def _conclude(self, holding: Holding) -> bool:
        """End a load with whatever is on the device by now. False: there was no room for what is missing, so the
        holding has let go of everything and waits in the line, at its old place."""
        load, width = holding.load, self.cache.layout.width
        assert load is not None
        start, stop = holding.published, load.stop
        ready = _present_stop(stretches(holding.device_run, start, stop), Tier.DEVICE, start)
        holding.table[start * width : ready * width] = self.pins.ready_ids(holding, start, ready)
        holding.published = holding.ready_stop = ready
        if ready < stop:
            step_back(self.cache, holding, ready)
        self.pins.end_host_lease(holding)
        missing = (stop - ready) * width
        if missing > self.admission.room:
            num_units = len(holding.table) // width
            self.pins.let_go(holding)
            holding.has_lost_load = True
            self.admission.wait_for_allocation(Waiter(holding, num_units, load.wake))
            return False
        holding.table[ready * width : stop * width] = self.cache.take(Tier.DEVICE, missing)
        holding.load = None
        return True

    def conclude_all(self, holdings: Iterable[Holding]) -> list[Callable[[], object]]:
        """End the loads of `holdings`; whom to wake once the line was served."""
        wakes: list[Callable[[], object]] = []
        for holding in holdings:
            assert holding.load is not None
            wake = holding.load.wake
            if self._conclude(holding):
                self.ready(holding)
                wakes.append(wake)
        return wakes

    def ready(self, holding: Holding) -> None:
        """Nothing has to be waited for: what is on the device counts as computed."""
        holding.num_computed_tokens = holding.published * self.cache.layout.unit_tokens
        self.moves.request(holding, _S.RUNNING)

    def abandon(self, holding: Holding) -> list[Job]:
        """Wait for nothing any more; queued jobs that nobody else waits for are discarded. Launched ones go on."""
        settled: list[Job] = []
        if holding.load is not None:
            for job in sorted(holding.load.jobs, key=lambda job: -job.job_id):
                if self.jobs.unclaim(job, holding):
                    settled += self.jobs.discard(job)
            holding.load.jobs.clear()
        return settled

    def settled(self, jobs: list[Job]) -> list[Holding]:
        """The holdings whose load is over now that `jobs` are settled, in the order of their tickets."""
        over: set[Holding] = set()
        for job in jobs:
            for holding in job.claims:
                if holding.load is not None:
                    holding.load.jobs.discard(job)
                    if not holding.load.jobs:
                        over.add(holding)
            job.claims.clear()
        return sorted(over, key=lambda holding: holding.ticket)


def _present_stop(over: list[Stretch], tier: Tier, start: int) -> int:
    """Up to where `tier` holds every unit from `start` on."""
    for stretch in over:
        if stretch.stop > start:
            start = max(start, min(stretch.run.parts[tier].stop, stretch.stop))
            if start < stretch.stop:
                break
    return start


def _incoming(over: list[Stretch], start: int) -> tuple[list[Job], int]:
    """The unsettled jobs that bring the units from `start` on, without a gap, and up to where they do.

    Not up to where the jobs end: that may be on another branch.
    """
    found: dict[Job, None] = {}
    position = start
    for stretch in over:
        if stretch.stop <= position:
            continue
        part = stretch.run.parts[Tier.DEVICE]
        chain: list[Job] = []
        job = part.incoming
        while job is not None and not job.is_settled and job.stop > start:
            chain.append(job)
            job = job.predecessor
        if not chain or chain[-1].start > position:  # what was to come first never will: the rest will not be entered
            break
        found.update(dict.fromkeys(chain))
        position = min(part.incoming_stop, stretch.stop)
        if position < stretch.stop:
            break
    return list(found), position

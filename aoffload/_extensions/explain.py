"""Status reports of a ledger: the holders of device blocks, and the cause of each request's wait.

Each call computes its report from the present state. Only the times of state changes are recorded in advance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import attrs

from .._common.tiers import Tier
from .._kernel.base import CacheBase
from .._kernel.extension import LedgerExtension
from .._kernel.ledger import CoreLedger
from .._kernel.records import Job, Lease, LedgerRequest, Step, Waiter
from .._kernel.states import RequestState as State
from .pins import Pins, pinned_parts
from .status import Declined, Fetching, Holder, RequestStatus, WaitsFor
from .transfers import CacheTransfer, CacheTransfers, Fetch

NUM_BIGGEST = 3
"""Holders named in the report of a wait for free blocks."""


class Reports(LedgerExtension):
    """`Ledger.reports` and `HostCache.reports`."""

    def __init__(self) -> None:
        self.asking: dict[LedgerRequest, float] = {}
        """Requests that wait for an answer of the remote store, each with the time of the question. The remote tier's
        loop side sets it."""
        self.declined: dict[str, Declined] = {}
        """By request id: the part of the hit that is computed instead of loaded. `LoadCosts` sets it."""

    def on_attach(self, ledger: CacheBase) -> None:
        self._ledger, self._jobs, self._layout = ledger, ledger.jobs, ledger.layout
        self._core = ledger if isinstance(ledger, CoreLedger) else None
        """The ledger, if it has steps and a wait queue."""

    @property
    def steps(self) -> Iterable[Step]:
        """The steps under way, the oldest first."""
        return () if self._core is None else self._core.steps.values()

    @property
    def _transfers(self) -> Iterable[CacheTransfer]:
        transfers = self._ledger.find(CacheTransfers)
        return () if transfers is None else transfers.under_way.values()

    # -- the verbs ------------------------------------------------------------------------------------------------

    def requests(self) -> tuple[RequestStatus, ...]:
        """The live requests, those that have been in their state for the longest first. Each status has the blocks that
        the request holds, the blocks that it waits for, and the holders of these. Ages are None in a ledger without a
        `clock`."""
        biggest = self.holders()
        places = {waiter: place for place, waiter in enumerate(self._waiters(), 1)}
        steps: dict[LedgerRequest, list[Step]] = {}
        for step in self.steps:
            for request in dict.fromkeys(step.requests):
                steps.setdefault(request, []).append(step)
        found = sorted(self._ledger.live_requests.values(), key=lambda request: request.since_s)
        fetches = {fetch.for_request: fetch for fetch in self._fetches()}
        return tuple(
            [self._status(request, places, biggest, steps.get(request, []), fetches.get(request)) for request in found]
        )

    def holders(self) -> tuple[Holder, ...]:
        """All holders of device blocks, the largest first, equals by age: requests, steps (also for requests that are
        over), pins, jobs, prefetches, demotions."""
        found = [holder for holder in self._all() if holder.num_blocks]
        return tuple(sorted(found, key=lambda holder: (-holder.num_blocks, -(holder.age_s or 0.0))))

    # -- holders --------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[Holder]:
        yield from map(self._request, self._ledger.live_requests.values())
        yield from map(self.step, self.steps)
        pins = self._ledger.find(Pins)
        for pin in () if pins is None else pins.held:
            yield Holder("pin", str(pin.pin_id), pin.state.value, self._age(pin.since_s), len(_pinned(pin.leases)))
        for job in (*self._jobs.unsettled.values(), *self._jobs.quarantined.values()):
            yield self._job(job)
        for transfer in self._transfers:
            request = transfer.request
            kind = type(transfer).__name__.lower()
            yield Holder(kind, request.request_id, transfer.state.value, None, num_held(request))

    def _request(self, request: LedgerRequest) -> Holder:
        age_s = self._age(request.since_s)
        return Holder("request", request.request_id, request.state.value, age_s, num_held(request))

    def step(self, step: Step) -> Holder:
        live_requests = tuple(dict.fromkeys(step.requests))
        over = tuple(request.request_id for request in live_requests if request.is_over)
        names = tuple(request.request_id for request in live_requests)
        num_blocks = sum(map(num_held, live_requests))
        return Holder("step", str(step.step_id), "open", self._age(step.begun_s), num_blocks, names, over)

    def _job(self, job: Job) -> Holder:
        is_in_doubt = job.job_id in self._jobs.quarantined
        state = "quarantined" if is_in_doubt else job.state.value
        if job.parked is not None:
            state = "parked"  # its copy has ended, and it waits for the job that brings the blocks before its own
        # The device blocks that the job writes. Until it is settled, also the blocks that it copies from and the blocks
        # before them.
        num_blocks = job.plan.num_blocks if job.plan.destination is Tier.DEVICE else 0
        if not is_in_doubt:  # the source blocks of a copy that was given up are free
            num_blocks += len(_pinned(job.leases()))
            if job.plan.source is Tier.DEVICE and job.source_lease is None:
                num_blocks = job.plan.num_blocks  # an engine's blocks have no leases
        began = (job.request_id,) if job.request_id else ()
        return Holder(job.plan.direction.value, str(job.job_id), state, self._age(job.since_s), num_blocks, began)

    # -- fetches --------------------------------------------------------------------------------------------------

    def _fetches(self) -> Iterator[Fetch]:
        """The fetches that a request waits for."""
        for transfer in self._transfers:
            if isinstance(transfer, Fetch) and transfer.for_request is not None:
                yield transfer

    def fetching(self) -> dict[Tier, int]:
        """Tokens that fetches bring for requests, by source tier. If several requests wait, each counts its tokens."""
        found: dict[Tier, int] = {}
        for fetch in self._fetches():
            for part in self._brought(fetch):
                found[part.tier] = found.get(part.tier, 0) + part.num_tokens
        return found

    @property
    def num_fetching(self) -> int:
        """Requests that wait for a fetch."""
        return sum(1 for _ in self._fetches())

    def _brought(self, fetch: Fetch) -> tuple[Fetching, ...]:
        """The tokens that jobs under way bring for `fetch`, including jobs of other fetches."""
        found: dict[Tier, int] = {}
        layout = self._layout
        leading = next(component.number for component in layout.components if component.width)
        for job in self._jobs_of(fetch.request):
            if job.component == leading and job.plan.source > Tier.HOST:
                found[job.plan.source] = found.get(job.plan.source, 0) + job.stop - job.start
        return tuple(Fetching(tier, found[tier] * layout.unit_tokens) for tier in sorted(found))

    @staticmethod
    def _jobs_of(request: LedgerRequest) -> list[Job]:
        return [] if request.load is None else sorted(request.load.jobs, key=lambda job: job.job_id)

    def _waiters(self) -> Iterator[Waiter]:
        if self._core is not None:
            yield from self._core.admission.queue.extending
            yield from self._core.admission.queue.allocating

    def _status(
        self,
        request: LedgerRequest,
        places: Mapping[Waiter, int],
        biggest: Sequence[Holder],
        steps: list[Step],
        fetch: Fetch | None = None,
    ) -> RequestStatus:
        waiter = request.waiter
        place = None if waiter is None else places.get(waiter)
        waits_for, held_by = self._reason(request, steps)
        asked_s = self.asking.get(request)
        status = RequestStatus(
            request.request_id,
            request.state,
            self._age(request.since_s),
            num_held(request),
            waits_for,
            waited_s=None if asked_s is None else self._age(asked_s),
            held_by=held_by,
            declined=self.declined.get(request.request_id),
            cancelled=request.reason,
        )
        if fetch is not None and place is None:
            # A job of a fetch holds host blocks, but no device blocks.
            jobs = [
                attrs.evolve(self._job(job), num_blocks=job.plan.num_blocks) for job in self._jobs_of(fetch.request)
            ]
            return attrs.evolve(
                status, waits_for=WaitsFor.FETCH, waited_s=None, held_by=tuple(jobs), fetching=self._brought(fetch),
                declined=None,
            )  # fmt: skip
        if waiter is None or place is None or self._core is None:
            return status
        return attrs.evolve(
            status,
            waits_for=WaitsFor.BLOCKS,
            place=place,
            waited_s=None if waiter.joined_s is None else self._age(waiter.joined_s),
            num_missing=self._core.admission.num_missing(request, waiter.num_units),
            held_by=tuple(islice(_others(biggest, request.request_id), NUM_BIGGEST)),
        )

    def _reason(self, request: LedgerRequest, steps: list[Step]) -> tuple[WaitsFor, tuple[Holder, ...]]:
        if request.state is State.LOADING and request.load is not None:
            return WaitsFor.COPIES, tuple(map(self._job, self._jobs_of(request)))
        bringer = self._ledger.waits_for(request)
        if bringer is not None and request.state is State.MATCHED:
            return WaitsFor.REQUEST, (self._request(bringer),)
        if steps:
            return WaitsFor.STEP, tuple(map(self.step, steps))
        return WaitsFor.ANSWER if request in self.asking else WaitsFor.PROGRAM, ()

    def wait_for_room(self, waiter: Waiter, biggest: Sequence[Holder]) -> RequestStatus:
        """The status of one waiter. The caller computes `biggest` once, because it may report many waiters."""
        places = {other: place for place, other in enumerate(self._waiters(), 1) if other is waiter}
        return self._status(waiter.request, places, biggest, [])

    def _age(self, since_s: float) -> float | None:
        clock = self._ledger.moves.clock
        return None if clock is None else float(max(0.0, clock() - since_s))

    # -- the oldest -----------------------------------------------------------------------------------------------

    def oldest_by_state(self) -> dict[str, float]:
        """For each state, the longest time in seconds that a live request has been in it."""
        first: dict[str, float] = {}
        for request in self._ledger.live_requests.values():
            state = request.state.value
            first[state] = min(first.get(state, request.since_s), request.since_s)
        return {state: self._longest([since_s]) for state, since_s in first.items()}

    def oldest_wait_s(self) -> float:
        """Seconds that the oldest waiter has been in the wait queue; 0 if the queue is empty."""
        return self._longest(waiter.joined_s for waiter in self._waiters() if waiter.joined_s is not None)

    def oldest_step_s(self) -> float:
        return self._longest(step.begun_s for step in self.steps)

    def _longest(self, times: Iterable[float]) -> float:
        return max((self._age(at) or 0.0 for at in times), default=0.0)


def _others(holders: Iterable[Holder], request_id: str) -> Iterator[Holder]:
    """The `holders` without the request itself, and without steps of this request alone."""
    for holder in holders:
        if (holder.kind, holder.name) != ("request", request_id) and holder.request_ids != (request_id,):
            yield holder


def num_held(request: LedgerRequest) -> int:
    """Number of device blocks that a request holds: the blocks of its tables and checkpoints, the blocks that its
    leases pin (even if the table has its own copy instead), and a grant that its task has not accepted yet."""
    found = set[int]()
    for table in request.tables:
        found.update(table.ids)
    if request.checkpoints is not None:
        found.update(request.checkpoints.ids())
    found.discard(0)
    granted = request.waiter.granted if request.waiter is not None else None
    return len(found.union(_pinned(request.all_leases()), granted or ()))


def _pinned(leases: Iterable[Lease]) -> set[int]:
    parts = {part for lease in leases if lease.tier is Tier.DEVICE for part in pinned_parts(lease)}
    return {block_id for part in parts for block_id in (*part.blocks, *part.tombstone_ids())}

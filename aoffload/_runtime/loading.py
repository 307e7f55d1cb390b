"""Loads that a request waits for, or on which a forward starts before they are over (layer-wise overlap)."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from .._arguments import shown
from .._kernel.records import Load
from .._kernel.requests import LedgerRequest, Waiter
from .._kernel.states import RequestState
from .._transfer.fences import LoadedRegion, RegionFences
from ..errors import InvalidArgument, WrongState
from .session import Entered, Session

__all__ = ["AwaitedLoad", "PendingLoad", "wait_for_room", "wait_until_woken"]


async def wait_until_woken(request: Entered, bound_s: float | None) -> bool:
    """Wait in `request` until it is woken, at most `bound_s` seconds. Returns whether the time is over."""
    event, worker = anyio.Event(), request._session.worker
    if bound_s is not None:
        worker.set_alarm(event, bound_s)
    try:
        await request._wait(event)
    finally:
        was_pending = worker.clear_alarm(event)
    return bound_s is not None and not was_pending


async def wait_for_room(request: Entered, waiter: Waiter | None) -> None:
    """Wait in `request`, whose `waiter` is in line, until it is woken, or until a long wait has been said to be one."""
    slow = request._session.slow
    if await wait_until_woken(request, slow.left_s(waiter)) and waiter is not None:
        slow.look_at_wait(waiter)


class AwaitedLoad:
    """Plans and submits a request's load, and waits for it in the request's task."""

    def __init__(self, request: Entered, max_tokens: int | None, into: Sequence[Sequence[int]] | None = None) -> None:
        self._request = request
        self._max_tokens = max_tokens
        self._into = into
        """Block tables, where an engine owns the device blocks."""

    def _start(self, record: LedgerRequest) -> None:
        session = self._request._session
        max_tokens = session.load_limit(record, self._max_tokens, self._request._left_s())
        plans = session.ledger.plan_load(
            record, max_tokens, self._request._wake, max_job_bytes=self._max_job_bytes, into=self._into
        )
        self._into = None  # it is named once
        self._watch(record)
        session.submit_transfers(plans)

    @property
    def _max_job_bytes(self) -> int | None:
        """Maximum bytes per job; None: as configured."""
        return None

    def _watch(self, record: LedgerRequest) -> None:
        """Called once the jobs are planned, before the jobs of this request are launched."""

    def _give_up(self) -> None:
        """Called when the load exceeds `load_timeout_s`, before the request abandons it."""

    async def _until_over(self, record: LedgerRequest) -> int:
        request, session = self._request, self._request._session
        while record.is_loading or session.ledger.lost_to_reset(record):
            if record.state is RequestState.RUNNING:  # a reset came between the end of the load and this task's turn
                self._start(record)
                continue
            if record.waiter is not None and record.waiter.is_over:
                session.ledger.accept(record.waiter)
                self._start(record)
                continue
            if record.state is not RequestState.LOADING:  # a step or a grant ends the wait
                await wait_for_room(request, record.waiter)
                continue
            is_late = await wait_until_woken(request, session.config.load_timeout_s)
            if is_late and record.state is RequestState.LOADING:
                self._max_tokens = 0  # if it has to queue for room now, its next plan loads nothing
                self._give_up()
                session.ledger.abandon_load(record)
        if record.state is RequestState.STRANDED:  # it was told that it can never fit, perhaps in another task
            raise WrongState(f"load: {record} had to let go of its blocks: leave it")
        if record.state is not RequestState.RUNNING:
            request._live()  # raises if the request is over or the runtime closed
            return 0  # preempted by another task: no blocks
        return record.num_computed_tokens


class PendingLoad(AwaitedLoad):
    """A load under way, as `Request.load_nowait` returns it. `wait` may be cancelled and called again.

    A forward may start before the load is over, in a step that names the pending load in place of its request:

        pending = request.load_nowait()
        if not pending.can_start:
            await pending.wait()
        with runtime.step([pending]):
            start, tables = pending.num_expected_tokens, pending.block_ids
            ...                               # in the forward's thread, before layer i reads: pending.region(i).wait()
        await pending.wait()
        if pending.first_invalid_token is None:
            request.commit(...)               # refused before the load is over, and if it fell short

    If a region raises `RegionNotLoaded`, nothing of that forward may be committed, however the load ends. `wait` counts
    `load_timeout_s`: if it is awaited in another task meanwhile, it ends the forward's waits for regions, too.
    """

    def __init__(self, request: Entered, max_tokens: int | None, into: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__(request, max_tokens, into)
        self._load: Load | None = None
        self._jobs: tuple[RegionFences, ...] = ()
        self._first_invalid_token: int | None = None
        self._is_told = False
        """Whether `wait` has returned: then the load counts, also behind a reset."""

    def __repr__(self) -> str:
        return f"<PendingLoad of {self._request!r}>"

    @property
    def is_over(self) -> bool:
        record = self._request._record
        return record is None or not record.is_loading

    async def wait(self) -> int:
        """Wait until the load is over, however it ends. Returns how many tokens are ready; 0 if it was preempted.

        Not in the task that holds a step of the request: a failed load may have to release blocks that the step holds.
        """
        record = self._live()
        num_ready = await self._until_over(record)
        if record.overlap is not None and record.state is RequestState.RUNNING:
            found = self._request._session.ledger.begin_again(record)
            if found is not None and self._first_invalid_token is None:
                self._first_invalid_token = found  # kept here: the next step resets it in the ledger
        self._is_told = True
        return num_ready

    # -- layer-wise overlap ---------------------------------------------------------------------------------------

    @property
    def can_start(self) -> bool:
        """Whether a step may name this load: all of it is under way, or it is over and the request is RUNNING. False
        behind a reset, until `wait` has returned."""
        record = self._live()
        if self._is_of_before(record) or self._is_lost(record):
            return False
        return record.state is RequestState.RUNNING or self._request._session.ledger.can_start_early(record)

    @property
    def num_expected_tokens(self) -> int:
        """Tokens whose KV is on the device once the fences of all regions have passed; compute starts behind them."""
        return self._request._session.ledger.num_expected_tokens(self._live())

    @property
    def block_ids(self) -> list[list[int]]:
        """The block table after the load, one list per group. Read it inside a step of this load, which holds these
        blocks. Without a step it raises `WrongState` while the load is under way."""
        return self._request._session.ledger.expected_block_ids(self._request._with_blocks())

    @property
    def regions(self) -> tuple[LoadedRegion, ...]:
        """One fence per region, in the order of `kv_caches`; a single one if the transport does not tell them apart."""
        return tuple(self.region(index) for index in range(self._num_regions or 1))

    def region(self, index: int) -> LoadedRegion:
        """The fence of region `index`; passes when the region's loaded blocks are on the device. For any thread."""
        num_regions = self._num_regions
        is_one = type(index) is int and index >= 0
        if not is_one or (num_regions is not None and index >= num_regions):
            regions = "a region" if num_regions is None else f"one of {num_regions} regions"
            raise InvalidArgument("index", f"must be the number of {regions}, got {shown(index)}")
        return LoadedRegion(tuple(fences[min(index, len(fences) - 1)] for fences in self._jobs))

    @property
    def first_invalid_token(self) -> int | None:
        """First token that has to be computed again, in a new step, because the load fell short after a forward had
        started on it. None: no token, or the load is not over. Reading this does not replace `wait`: a commit is
        refused until `wait` has returned."""
        self._request._session.check_may_look()
        record = self._request._record
        if self._first_invalid_token is None and record is not None and not self._is_of_before(record):
            return self._request._session.ledger.first_invalid_token(record)
        return self._first_invalid_token

    @property
    def _num_regions(self) -> int | None:
        return self._request._session.worker.regions.num_regions

    def _live(self) -> LedgerRequest:
        return self._request._live()

    def _arriving(self, session: Session) -> LedgerRequest:
        """The record, for a step of `session`. `WrongState` if another load of the request is under way."""
        if self._request._session is not session:
            raise InvalidArgument("requests", f"holds what is no request of this runtime: {shown(self._request)}")
        record = self._live()
        if self._is_of_before(record):
            raise WrongState(f"step: {self!r} is over, and another load is under way: take what began that one")
        if self._is_lost(record):
            raise WrongState(f"step: {self!r} has lost to a reset what it brought: await `wait` first")
        return record

    def _is_lost(self, record: LedgerRequest) -> bool:
        return not self._is_told and self._request._session.ledger.lost_to_reset(record)

    def _is_of_before(self, record: LedgerRequest) -> bool:
        return record.load is not None and record.load is not self._load

    @property
    def _max_job_bytes(self) -> int:
        """A region is complete only with the last job, so one job takes the whole load if it may be in flight."""
        return self._request._session.config.bytes_in_flight

    def _watch(self, record: LedgerRequest) -> None:
        """Watches all jobs of the load, including those that other requests have started."""
        fences_of = self._request._session.worker.regions.fences_of
        self._load = record.load
        jobs = () if record.load is None else sorted(record.load.jobs, key=lambda job: job.job_id)
        self._jobs = tuple(fences_of(job.job_id, job.parked).fork() for job in jobs)

    def _give_up(self) -> None:
        # A forward that waits for its regions holds a step, and the step may hold blocks that are needed to go on.
        for fences in self._jobs:
            fences.end("not there within load_timeout_s")

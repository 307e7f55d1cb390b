"""Loads: a request waits until its load is over, or a forward starts before the load is over (layer-wise overlap).

The ledger plans a load: it takes blocks and returns the copies; the copy worker launches them. In three cases the
load's task plans again instead of continuing: the blocks that a requeued request waited for were granted; a reset came
between the end of the load and the task's turn, so the loaded tokens must not count; `load_timeout_s` is over, so the
request gives up the copies and computes. A failed copy raises no error: fewer tokens are ready.

A forward that starts early reads layer i as soon as region i has arrived. Each job of the load has a fence per region
(`RegionFences`), which any thread may wait for. `load_timeout_s` ends these waits, too, because the forward holds a
step, and the step may hold blocks that the request needs to continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio.lowlevel

from .._common.arguments import shown
from .._extensions.assembly import Ledger
from .._extensions.overlap import Overlap
from .._kernel.records import LedgerRequest, Load
from .._kernel.states import LOADING, RUNNING, STRANDED
from .._transfer.fences import LoadedRegion, RegionFences
from ..errors import InvalidArgument, WrongState
from .session import Entered, Session

_NOTHING: Mapping[str, Any] = {}


class LoadUnderWay:
    """Base of `PendingLoad` and `EnginePendingLoad`."""

    __slots__ = (
        "__weakref__", "_first_invalid_token", "_has_fences", "_has_returned", "_into", "_jobs", "_load", "_max_tokens",
        "_request",
    )  # fmt: skip

    def __init__(
        self,
        request: Entered,
        record: LedgerRequest,
        max_tokens: int | None,
        into: Mapping[str, Any] = _NOTHING,
        *,
        has_fences: bool = True,
    ) -> None:
        self._request: Any = request
        self._max_tokens = max_tokens
        self._into = into
        """Arguments of `HostCache.plan_load` that name the engine's blocks, if an engine owns them. Only the first plan
        uses them."""
        self._has_fences = has_fences
        """Whether a forward may wait for regions."""
        self._load: Load | None = None
        self._jobs: tuple[RegionFences, ...] = ()
        self._first_invalid_token: int | None = None
        self._has_returned = False
        """Whether `wait` has returned: from then on the caller knows the result, and a reset no longer undoes it."""
        self._start(record)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._request!r}>"

    def _start(self, record: LedgerRequest) -> None:
        """Plan the load and launch its copies."""
        request, session = self._request, self._request._session
        # A region is complete only with the last job, so one job takes the whole load if it may be in flight.
        max_job_bytes = session.config.bytes_in_flight if self._has_fences else None
        plans = request._plan_load(record, self._max_tokens, max_job_bytes, self._into)
        self._into = _NOTHING
        if self._has_fences:  # of all jobs of the load, including those that other requests have started
            self._load, fences_of = record.load, session.worker.copies.regions.fences_of
            jobs = () if record.load is None else sorted(record.load.jobs, key=lambda job: job.job_id)
            self._jobs = tuple(fences_of(job.job_id, job.parked).fork() for job in jobs)
        session.submit_transfers(plans)

    # -- waiting --------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        record = self._request._record
        return record is None or not record.is_loading

    async def wait(self) -> int:
        """Wait until the load is over, however it ends. Returns how many tokens are ready; 0 if the request was
        preempted.

        Do not call it in the task that holds a step of the request: a failed load may have to release blocks that the
        step holds.
        """
        record = self._request._live()
        num_ready = await self._until_over(record)
        self._is_told(record)
        self._has_returned = True
        return num_ready

    def _is_told(self, record: LedgerRequest) -> None:
        """Called before `wait` returns the result of the load. Does nothing here."""

    async def _until_over(self, record: LedgerRequest) -> int:
        request, session = self._request, self._request._session
        while record.is_loading or session.ledger.lost_to_reset(record):
            if record.state is RUNNING:  # a reset came between the end of the load and this task's turn
                self._start(record)
                continue
            if record.waiter is not None and record.waiter.is_over:
                session.ledger.accept(record.waiter)
                self._start(record)
                continue
            if record.state is not LOADING:  # a step or a grant ends the wait
                await request._wait_for_blocks(record.waiter)
                continue
            if session.worker.settle_now():  # perhaps of this load: check again, after a turn for other tasks
                await anyio.lowlevel.checkpoint()
                continue
            is_late = await request._wait(session.config.load_timeout_s)
            if is_late and record.state is LOADING:
                self._max_tokens = 0  # if it is requeued now, its next plan loads nothing
                for fences in self._jobs:
                    fences.end("not loaded within load_timeout_s")
                session.ledger.abandon_load(record)
        if record.state is STRANDED:  # it can never fit; `accept` raised that, perhaps in another task
            raise WrongState(f"load: {record} had to give up its blocks and can never fit: leave it")
        if record.state is not RUNNING:
            request._live()  # raises if the request is over or the runtime closed
            return 0  # preempted by another task: no blocks
        return record.num_computed_tokens

    # -- regions --------------------------------------------------------------------------------------------------

    @property
    def regions(self) -> tuple[LoadedRegion, ...]:
        """One fence per region, in the order of `kv_caches`; a single one if the transport does not tell them apart."""
        num_regions = self._request._session.worker.copies.regions.num_regions
        return tuple(self.region(index) for index in range(num_regions or 1))

    def region(self, index: int) -> LoadedRegion:
        """The fence of region `index`. It passes when the region's loaded blocks are on the device. Any thread may use
        it."""
        num_regions = self._request._session.worker.copies.regions.num_regions
        is_one = type(index) is int and index >= 0
        if not is_one or (num_regions is not None and index >= num_regions):
            regions = "a region" if num_regions is None else f"one of {num_regions} regions"
            raise InvalidArgument("index", f"must be the index of {regions}, got {shown(index)}")
        return LoadedRegion(tuple(fences[min(index, len(fences) - 1)] for fences in self._jobs))


class EnginePendingLoad(LoadUnderWay):
    """A load under way, as `EngineRequest.load_nowait` returns it. `wait` may be cancelled and called again. A forward
    in a step of the engine's own may wait for its `regions` one by one."""

    __slots__ = ()


class PendingLoad(LoadUnderWay):
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

    If a region raises `RegionNotLoaded`, commit nothing of that forward, however the load ends. `wait` applies
    `load_timeout_s`. If another task awaits it meanwhile, the time-out also ends the forward's waits for regions.
    """

    __slots__ = ()

    def _is_told(self, record: LedgerRequest) -> None:
        overlap = self._request._session.ledger.find(Overlap)
        if overlap is not None and record in overlap and record.state is RUNNING:
            found = overlap.begin_again(record)
            if found is not None and self._first_invalid_token is None:
                self._first_invalid_token = found  # kept here: the next step resets it in the ledger

    # -- layer-wise overlap ---------------------------------------------------------------------------------------

    @property
    def can_start(self) -> bool:
        """Whether a step may name this load: all of it is under way, or it is over and the request is RUNNING. False
        after a reset, until `wait` has returned."""
        record = self._request._live()
        if self._is_replaced(record) or self._is_lost(record):
            return False
        return record.state is RUNNING or self._request._session.ledger.overlap.can_start(record)

    def _arriving(self, session: Session[Ledger]) -> LedgerRequest:
        """The record, for a step of `session`. `WrongState` if another load of the request is under way."""
        if self._request._session is not session:
            raise InvalidArgument(
                "requests", f"contains an object that is not a request of this runtime: {shown(self._request)}"
            )
        record: LedgerRequest = self._request._live()
        if self._is_replaced(record):
            raise WrongState(f"step: {self!r} is over, and its request has begun another load: use that pending load")
        if self._is_lost(record):
            raise WrongState(f"step: a reset has undone {self!r}: await `wait` first")
        return record

    def _is_lost(self, record: LedgerRequest) -> bool:
        return not self._has_returned and self._request._session.ledger.lost_to_reset(record)

    def _is_replaced(self, record: LedgerRequest) -> bool:
        """Whether a later load of the request is under way."""
        return record.load is not None and record.load is not self._load

    @property
    def num_expected_tokens(self) -> int:
        """Tokens whose KV is on the device once the fences of all regions have passed. Compute starts after these
        tokens."""
        overlap: Overlap = self._request._session.ledger.overlap
        return overlap.num_expected_tokens(self._request._live())

    @property
    def block_ids(self) -> list[list[int]]:
        """The block table after the load, one list per group. Read it inside a step of this load, which holds these
        blocks. Without a step it raises `WrongState` while the load is under way."""
        overlap: Overlap = self._request._session.ledger.overlap
        return overlap.block_ids(self._request._with_blocks())

    @property
    def first_invalid_token(self) -> int | None:
        """First token that has to be computed again, in a new step, because the load fell short after a forward had
        started on it. None if there is no such token, or the load is not over. Reading this does not replace `wait`: a
        commit is refused until `wait` has returned."""
        self._request._session.check_may_read()
        record = self._request._record
        if self._first_invalid_token is None and record is not None and not self._is_replaced(record):
            overlap = self._request._session.ledger.find(Overlap)
            return None if overlap is None else overlap.first_invalid_token(record)
        return self._first_invalid_token

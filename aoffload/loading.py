"""A load that a request waits for, or starts on before it is over."""

from __future__ import annotations

import anyio

from .arguments import shown
from .core.lifecycle import RequestState
from .core.owners import Holding
from .core.records import Load
from .errors import InvalidArgument, WrongState
from .session import Entered, Session
from .transfer.region_fences import LoadedRegion, RegionFences

__all__ = ["AwaitedLoad", "PendingLoad"]


class AwaitedLoad:
    """How a request's task waits for what is brought onto the device."""

    def __init__(self, request: Entered, max_tokens: int | None) -> None:
        self._request = request
        self._max_tokens = max_tokens

    def _start(self, holding: Holding) -> None:
        session = self._request._session
        plans = session.ledger.plan_load(
            holding, self._max_tokens, self._request._wake, max_job_bytes=self._max_job_bytes
        )
        self._watch(holding)
        session.worker.submit(plans)

    @property
    def _max_job_bytes(self) -> int | None:
        """None: as configured."""
        return None

    def _watch(self, holding: Holding) -> None:
        """The jobs are planned, and none of ours is launched."""

    def _give_up(self) -> None:
        """The load takes too long; nobody waits for it any more."""

    async def _until_over(self, holding: Holding) -> int:
        request, session = self._request, self._request._session
        while holding.is_loading:
            if holding.waiter is not None and holding.waiter.is_over:
                session.ledger.accept(holding.waiter)
                self._start(holding)
                continue
            has_bound = holding.state is RequestState.LOADING  # else a step or a grant ends the wait
            is_late = await self._wait(session.config.load_timeout_s if has_bound else None)
            if is_late and holding.state is RequestState.LOADING:
                self._max_tokens = 0  # should it have to queue for room now, it doesn't wait for this load again
                self._give_up()
                session.ledger.abandon_load(holding)
        if holding.state is RequestState.STRANDED:  # it was told that it can never fit, perhaps in another task
            raise WrongState(f"load: {holding} had to let go of its blocks: leave it")
        if holding.state is not RequestState.RUNNING:
            request._live()  # it is over by now, or the runtime was closed
            return 0  # another task has preempted it meanwhile: it has no blocks
        return holding.num_computed_tokens

    async def _wait(self, bound_s: float | None) -> bool:
        """Wait to be woken, or until `bound_s` is over; whether it is."""
        event, worker = anyio.Event(), self._request._session.worker
        if bound_s is not None:
            worker.set_alarm(event, bound_s)
        try:
            await self._request._wait(event)
        finally:
            was_pending = worker.clear_alarm(event)
        return bound_s is not None and not was_pending


class PendingLoad(AwaitedLoad):
    """A load on its way, as `Request.load_nowait` returns it. `wait` may be cancelled and called again.

    A forward may start on it, in a step that names the pending load in place of its request:

        pending = request.load_nowait()
        if not pending.can_start:
            await pending.wait()
        with runtime.step([pending]):
            start, tables = pending.num_expected_tokens, pending.block_ids
            ...                               # in the forward's thread, before layer i reads: pending.region(i).wait()
        await pending.wait()
        if pending.first_invalid_token is None:
            request.commit(...)               # refused before the load is over, and if it fell short

    A forward in which a region has raised `RegionNotLoaded` has computed nothing that may be committed, however the
    load ends. `load_timeout_s` is counted by `wait`: awaited in another task meanwhile, it ends the forward's wait.
    """

    def __init__(self, request: Entered, max_tokens: int | None) -> None:
        super().__init__(request, max_tokens)
        self._load: Load | None = None
        self._jobs: tuple[RegionFences, ...] = ()
        self._first_invalid_token: int | None = None

    def __repr__(self) -> str:
        return f"<PendingLoad of {self._request!r}>"

    @property
    def is_over(self) -> bool:
        holding = self._request._holding
        return holding is None or not holding.is_loading

    async def wait(self) -> int:
        """Wait until the load is over, however it ends; the number of tokens that are ready, 0 once it is preempted.

        Not in the task that holds a step of the request: what a load that failed has to give back, a step may hold.
        """
        holding = self._live()
        num_ready = await self._until_over(holding)
        if holding.state is RequestState.RUNNING:
            found = self._request._session.ledger.begin_again(holding)
            if found is not None and self._first_invalid_token is None:
                self._first_invalid_token = found  # it goes on saying so when the next step has begun
        return num_ready

    # -- starting before it is over -------------------------------------------------------------------------------

    @property
    def can_start(self) -> bool:
        """Whether a step may name it now: all of the load is under way, or it is over and the request runs."""
        holding = self._live()
        if self._is_of_before(holding):
            return False
        return holding.state is RequestState.RUNNING or self._request._session.ledger.can_start_early(holding)

    @property
    def num_expected_tokens(self) -> int:
        """Tokens whose KV is on the device once the fences of all regions have passed: where to compute from."""
        return self._request._session.ledger.num_expected_tokens(self._live())

    @property
    def block_ids(self) -> list[list[int]]:
        """The block table as it will be then, one list per group. To be read inside of a step of this load, which
        holds those blocks; `WrongState` without one while it is under way."""
        return self._request._session.ledger.expected_block_ids(self._live())

    @property
    def regions(self) -> tuple[LoadedRegion, ...]:
        """A fence for each region, in the order of `kv_caches`; one for all, where the transport cannot tell."""
        return tuple(self.region(index) for index in range(self._num_regions or 1))

    def region(self, index: int) -> LoadedRegion:
        """The fence of region `index`: passes when the loaded blocks of that region are there. In any thread."""
        num_regions = self._num_regions
        is_one = type(index) is int and index >= 0
        if not is_one or (num_regions is not None and index >= num_regions):
            regions = "a region" if num_regions is None else f"one of {num_regions} regions"
            raise InvalidArgument("index", f"must be the number of {regions}, got {shown(index)}")
        return LoadedRegion(tuple(fences[min(index, len(fences) - 1)] for fences in self._jobs))

    @property
    def first_invalid_token(self) -> int | None:
        """From which token on what was computed before the load was over is wrong, and has to be computed again, in a
        new step. None: nothing is, or the load is not over. Looking changes nothing: only who has waited may commit."""
        holding = self._request._holding
        if self._first_invalid_token is None and holding is not None and not self._is_of_before(holding):
            return self._request._session.ledger.first_invalid_token(holding)
        return self._first_invalid_token

    @property
    def _num_regions(self) -> int | None:
        return self._request._session.worker.regions.num_regions

    def _live(self) -> Holding:
        return self._request._live()

    def _arriving(self, session: Session) -> Holding:
        """For a step of `session`. Its fences have to be those of the load that is under way."""
        if self._request._session is not session:
            raise InvalidArgument("requests", f"holds what is no request of this runtime: {shown(self._request)}")
        holding = self._live()
        if self._is_of_before(holding):
            raise WrongState(f"step: {self!r} is over, and another load is under way: take what began that one")
        return holding

    def _is_of_before(self, holding: Holding) -> bool:
        return holding.load is not None and holding.load is not self._load

    @property
    def _max_job_bytes(self) -> int:
        """A region is there when the last job has brought it, so there is one job, if it may be in flight."""
        return self._request._session.config.bytes_in_flight

    def _watch(self, holding: Holding) -> None:
        """Others' jobs, too: what they bring is waited for like what our own do."""
        fences_of = self._request._session.worker.regions.fences_of
        self._load = holding.load
        jobs = () if holding.load is None else sorted(holding.load.jobs, key=lambda job: job.job_id)
        self._jobs = tuple(fences_of(job.job_id, job.parked).fork() for job in jobs)

    def _give_up(self) -> None:
        # A forward that waits for its regions holds a step, and that may hold the room that is needed to go on.
        for fences in self._jobs:
            fences.end("not there within load_timeout_s")

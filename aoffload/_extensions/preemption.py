"""Preemption: a request gives up its device blocks, keeps its progress in host memory, and gets it back later."""

from __future__ import annotations

from dataclasses import dataclass

from .._kernel.cache import PrefixCache
from .._kernel.jobs import JobBook, Stores
from .._kernel.leases import RequestLeases
from .._kernel.moves import Moves
from .._kernel.plans import Preemption, TransferPlan
from .._kernel.requests import LedgerRequest
from .._kernel.states import RequestState as State
from .._kernel.states import Tier, require
from .._kernel.waiting import Admission, is_waiting
from ..errors import WrongState
from .overlap import tell
from .store_policies import NoStore, StorePolicy

__all__ = ["Preemptions"]


@dataclass(slots=True, eq=False)
class Preemptions:
    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    jobs: JobBook
    stores: Stores
    admission: Admission
    policy: StorePolicy

    @staticmethod
    def check(request: LedgerRequest) -> None:
        """Refuse to preempt a request without blocks to give up, in a step, or waiting for room (unless REQUEUED)."""
        require(
            request, "preempt",
            State.ALLOCATED, State.LOADING, State.DRAINING, State.REQUEUED, State.STRANDED, State.RUNNING,
            instead="it has no blocks to give up",
        )  # fmt: skip
        if request.waiter is not None and request.state is not State.REQUEUED:
            raise is_waiting(request, "preempt")
        if request.num_steps:
            raise WrongState(f"preempt: a step touches the blocks of {request}")

    def preempt(self, request: LedgerRequest) -> Preemption:
        """Offer what is computed to the host, pin it there, and release every device block. The caller has abandoned
        the load, if there was one."""
        before = self.admission.num_available
        if request.waiter is not None:
            self.admission.leave(request.waiter)
        if request.state is not State.RUNNING:
            self.request_leases.end_host_lease(request)
            request.computed(request.published * self.cache.layout.unit_tokens)
        plans = self._store(request)
        run, held = request.device_run, self._held(request)
        self.request_leases.give_up_tables(request)
        if run is not None:
            self.request_leases.keep(request, self.stores.destination, run)
            self.request_leases.follow(request, None)
        request.preempted(self.cache.layout.unit_tokens)
        self.moves.request(request, State.PREEMPTED)
        tell(self.moves, request)
        read = {job.job_id: held & _read_by(job.plan) for job in self.jobs.unsettled.values()}
        job_ids = tuple(job_id for job_id, blocks in read.items() if blocks)
        num_freed = max(
            0, self.admission.num_available - before
        )  # less than 0 if stores pin the margin before a window
        return Preemption(num_freed, len(set().union(*read.values())), job_ids, plans)

    def resume(self, request: LedgerRequest, num_tokens: object) -> None:
        """Match it again, with what it has computed: PINNED. It asks for room and a load as after the first match."""
        require(request, "resume", State.PREEMPTED, instead="only a request that was preempted is resumed")
        if num_tokens is not None:
            self.admission.check_could_fit(num_tokens)
        self.moves.request(request, State.MATCHED)
        self.request_leases.match_again(request)
        self.moves.request(request, State.PINNED)

    def _store(self, request: LedgerRequest) -> tuple[TransferPlan, ...]:
        """Store at once what is published, whatever the timing of the policy; nothing with `NoStore`, nor beyond the
        request's store limit."""
        run, stop = request.device_run, min(request.published, request.store_limit)
        if run is None or not stop or request.epoch != self.cache.epoch or isinstance(self.policy, NoStore):
            return ()
        jobs = self.stores.offer(request, run, request.published, stop, with_windows=True)
        return tuple(job.plan for job in jobs)

    @staticmethod
    def _held(request: LedgerRequest) -> set[int]:
        return {block_id for table in request.tables for block_id in table.ids if block_id}


def _read_by(plan: TransferPlan) -> set[int]:
    return set(plan.source_ids) if plan.source is Tier.DEVICE else set()

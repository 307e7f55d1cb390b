"""Preemption: a request gives up its device blocks, keeps its progress in host memory, and gets it back later."""

from __future__ import annotations

from dataclasses import dataclass

from .._kernel.cache import PrefixCache
from .._kernel.events import Moves
from .._kernel.jobs import JobBook, Stores
from .._kernel.leases import RequestLeases
from .._kernel.plans import Preemption, TransferPlan
from .._kernel.requests import Holding
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
    def check(holding: Holding) -> None:
        """Refuse to preempt a request without blocks to give up, in a step, or waiting for room (unless REQUEUED)."""
        require(
            holding, "preempt",
            State.ALLOCATED, State.LOADING, State.DRAINING, State.REQUEUED, State.STRANDED, State.RUNNING,
            instead="it has no blocks to give up",
        )  # fmt: skip
        if holding.waiter is not None and holding.state is not State.REQUEUED:
            raise is_waiting(holding, "preempt")
        if holding.num_steps:
            raise WrongState(f"preempt: a step touches the blocks of {holding}")

    def preempt(self, holding: Holding) -> Preemption:
        """Offer what is computed to the host, pin it there, and release every device block. The caller has abandoned
        the load, if there was one."""
        before = self.admission.room
        if holding.waiter is not None:
            self.admission.leave(holding.waiter)
        if holding.state is not State.RUNNING:
            self.request_leases.end_host_lease(holding)
            holding.computed(holding.published * self.cache.layout.unit_tokens)
        plans = self._store(holding)
        run, held = holding.device_run, self._held(holding)
        self.request_leases.give_up_tables(holding)
        if run is not None:
            self.request_leases.keep(holding, self.stores.destination, run)
            self.request_leases.follow(holding, None)
        holding.preempted(self.cache.layout.unit_tokens)
        self.moves.request(holding, State.PREEMPTED)
        tell(self.moves, holding)
        read = {job.job_id: held & _read_by(job.plan) for job in self.jobs.unsettled.values()}
        job_ids = tuple(job_id for job_id, blocks in read.items() if blocks)
        num_freed = max(0, self.admission.room - before)  # less than 0 if stores pin the margin before a window
        return Preemption(num_freed, len(set().union(*read.values())), job_ids, plans)

    def resume(self, holding: Holding, num_tokens: object) -> None:
        """Match it again, with what it has computed: PINNED. It asks for room and a load as after the first match."""
        require(holding, "resume", State.PREEMPTED, instead="only a request that was preempted is resumed")
        if num_tokens is not None:
            self.admission.check_could_fit(num_tokens)
        self.moves.request(holding, State.MATCHED)
        self.request_leases.match_again(holding)
        self.moves.request(holding, State.PINNED)

    def _store(self, holding: Holding) -> tuple[TransferPlan, ...]:
        """Store at once what is published, whatever the timing of the policy; nothing with `NoStore`, nor beyond the
        request's store limit."""
        run, stop = holding.device_run, min(holding.published, holding.store_limit)
        if run is None or not stop or holding.epoch != self.cache.epoch or isinstance(self.policy, NoStore):
            return ()
        jobs = self.stores.offer(holding, run, holding.published, stop, with_windows=True)
        return tuple(job.plan for job in jobs)

    @staticmethod
    def _held(holding: Holding) -> set[int]:
        return {block_id for table in holding.tables for block_id in table.ids if block_id}


def _read_by(plan: TransferPlan) -> set[int]:
    return set(plan.source_ids) if plan.source is Tier.DEVICE else set()

"""Preemption: a request gives up its device blocks, keeps its progress in host memory, and continues later.

A preempted request has one lease, on the host copy of its published units, and its tokens. `resume` matches it again,
and from there on it is served like a new request: blocks, load, step. Units that the host could not store are computed
again. Results of the last step that are not committed are lost with their blocks (`Computing.LOST_BLOCKS`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .._kernel.cache import PrefixCache
from .._kernel.jobs import JobBook, Stores
from .._kernel.leases import RequestLeases
from .._kernel.moves import Moves
from .._kernel.plans import Preemption
from .._kernel.records import Job
from .._kernel.requests import LedgerRequest
from .._kernel.states import Computing, Tier, require
from .._kernel.states import RequestState as State
from .._kernel.waiting import Admission, waiting_error
from ..errors import WrongState
from .overlap import acknowledge


@dataclass(slots=True, eq=False)
class Preemptions:
    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    jobs: JobBook
    stores: Stores
    admission: Admission
    stores_nothing: bool
    """Whether the store policy is `NoStore`."""

    @staticmethod
    def check(request: LedgerRequest) -> None:
        """Refuse to preempt a request that has no blocks to give up, is in a step, or waits for blocks (unless
        REQUEUED)."""
        require(
            request, "preempt",
            State.ALLOCATED, State.LOADING, State.DRAINING, State.REQUEUED, State.STRANDED, State.RUNNING,
            instead="it has no blocks to give up",
        )  # fmt: skip
        if request.waiter is not None and request.state is not State.REQUEUED:
            raise waiting_error(request, "preempt")
        if request.num_steps:
            raise WrongState(f"preempt: a step touches the blocks of {request}")

    def preempt(self, request: LedgerRequest) -> Preemption:
        """Store the published units in the host, pin its copy, and release every device block. The caller has abandoned
        the load, if there was one."""
        cache, before, published = self.cache, self.admission.num_available, request.published
        unit_tokens, run = cache.layout.unit_tokens, request.device_run
        if request.waiter is not None:
            self.admission.leave(request.waiter)
        if request.state is not State.RUNNING:
            self.request_leases.end_host_lease(request)
            request.num_computed_tokens = published * unit_tokens

        # Stored at once, whatever the timing of the policy, but nothing with `NoStore`, nor beyond the store limit.
        jobs: list[Job] = []
        stop = min(published, request.store_limit)
        if run is not None and stop and request.epoch == cache.epoch and not self.stores_nothing:
            jobs = self.stores.offer(request, run, published, stop, with_windows=True)
        held = {block_id for table in request.tables for block_id in table.ids if block_id}
        self.request_leases.give_up_tables(request)
        if run is not None:
            request.leases[self.stores.destination] = cache.lease(self.stores.destination, run)
            self.request_leases.lease_device_to(request, None)

        # The limit of `admit` is about the prompt. What the request itself has computed may always be matched.
        request.hit_limit = max(request.hit_limit, request.num_computed_tokens // unit_tokens)
        request.read_before = max(request.read_before, published)
        request.published = request.ready_stop = 0
        if request.computing is Computing.ITS_BLOCKS:
            request.computing = Computing.LOST_BLOCKS
        self.moves.request(request, State.PREEMPTED)
        acknowledge(self.moves, request)

        stores = [job for job in self.jobs.unsettled.values() if job.plan.source is Tier.DEVICE]
        read = {job.job_id: held.intersection(job.plan.source_ids) for job in stores}
        job_ids = tuple(job_id for job_id, blocks in read.items() if blocks)
        # The difference is negative if the stores pin blocks that were evictable, such as the margin before a window.
        num_freed = max(0, self.admission.num_available - before)
        return Preemption(num_freed, len(set().union(*read.values())), job_ids, tuple(job.plan for job in jobs))

    def resume(self, request: LedgerRequest, num_tokens: object) -> None:
        """Match it again, with the tokens that it has computed: PINNED. Blocks and a load follow as after `admit`."""
        require(request, "resume", State.PREEMPTED, instead="only a request that was preempted is resumed")
        if num_tokens is not None:
            self.admission.check_could_fit(num_tokens)
        self.moves.request(request, State.MATCHED)
        self.request_leases.match_again(request)
        self.moves.request(request, State.PINNED)

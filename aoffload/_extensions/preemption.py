"""Preemption: a request gives up its device blocks, keeps its progress in host memory, and continues later.

A preempted request keeps its tokens, and one lease on the host copy of its published units. `resume` matches it again,
and then it allocates blocks, loads and steps like a new request. It computes units again that the host could not store.
With a recurrent state, the lease pins the last checkpoint, too, and the request computes again what follows it.
Uncommitted results of the last step are lost with their blocks (`Computing.LOST_BLOCKS`).
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from .._common.tiers import Tier
from .._kernel.extension import LedgerExtension
from .._kernel.ledger import CoreLedger
from .._kernel.plans import TransferPlan
from .._kernel.records import Job, LedgerRequest
from .._kernel.states import Computing, require
from .._kernel.states import RequestState as State
from .._kernel.waiting import waiting_error
from ..errors import WrongState
from .invalidation import Invalidation


@attrs.frozen
class Preemption:
    """The device blocks that a preempted request has given up."""

    num_freed: int
    """Device blocks that became available, without the blocks of an abandoned load. Blocks that other requests share
    stay in use."""
    num_pending: int
    """Device blocks that copies still read. They are released when the jobs in `job_ids` are over."""
    job_ids: tuple[int, ...]
    plans: tuple[TransferPlan, ...] = ()
    """Stores to launch."""


class Preemptions(LedgerExtension):
    """Preempts requests and resumes them (`Ledger.preemption`)."""

    def __init__(self, *, stores_nothing: bool) -> None:
        """`stores_nothing`: whether the store policy is `NoStore`."""
        self._stores_nothing = stores_nothing

    def on_attach(self, ledger: CoreLedger) -> None:
        self._ledger, self._cache, self._moves, self._jobs = ledger, ledger.cache, ledger.moves, ledger.jobs
        self._request_leases, self._stores, self._admission = ledger.request_leases, ledger.stores, ledger.admission
        ledger.add_once(Invalidation, Invalidation)  # it remembers which units a preempted request has read

    @staticmethod
    def may_preempt(request: LedgerRequest) -> bool:
        """Whether `request` may be preempted while no step holds its blocks."""
        has_blocks = bool(request.tables) or request.state in (State.REQUEUED, State.STRANDED)
        waits = request.waiter is not None and request.state is not State.REQUEUED
        return has_blocks and not waits and not request.is_over

    # -- the verbs ------------------------------------------------------------------------------------------------

    def preempt(self, request: LedgerRequest) -> Preemption:
        """Give up every device block of `request`. Its computed blocks are stored in host memory, as far as the host
        has free blocks, and stay pinned there until the request is resumed or over. Refused while the request is in a
        step, or in the wait queue (unless REQUEUED)."""
        self._check(self._ledger.own(request))
        wakes: list[Callable[[], object]] = []
        load = request.load
        if load is not None:
            wakes += self._jobs.end_claims(self._jobs.abandon(load))
            wakes += load.conclude()
        if request.waiter is not None:  # REQUEUED: end its wait, too
            wakes.append(request.waiter.wake)
        found = self._preempt(request)
        self._ledger.end_call(wakes)
        return found

    def resume(self, request: LedgerRequest, num_tokens: int | None = None) -> None:
        """Match a preempted request again, with the tokens that it had computed. The request is PINNED afterwards, as
        after `admit`, and computes again from the first token that no load brings back.

        `num_tokens`: the number of tokens that the request will allocate. `OutOfBlocks` if these tokens can never fit;
        nothing has changed then.
        """
        require(self._ledger.own(request), "resume", State.PREEMPTED, instead="only a preempted request can be resumed")
        if num_tokens is not None:
            self._admission.check_could_fit(num_tokens)
        self._moves.request(request, State.MATCHED)
        self._request_leases.match_again(request)
        self._moves.request(request, State.PINNED)
        self._ledger.end_call()

    # -- the preemption itself ------------------------------------------------------------------------------------

    @staticmethod
    def _check(request: LedgerRequest) -> None:
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
            raise WrongState(f"preempt: a step uses the blocks of {request}")

    def _preempt(self, request: LedgerRequest) -> Preemption:
        """Store the published units in the host, pin the host copy, and release every device block. The caller has
        abandoned the load, if there was one."""
        for hook in self._ledger.hooks.on_leaving:
            hook(request, False)
        cache, before, published = self._cache, self._admission.num_available, request.published
        unit_tokens, run = cache.layout.unit_tokens, request.device_run
        if request.waiter is not None:
            self._admission.leave(request.waiter)
        if request.state is not State.RUNNING:
            self._request_leases.end_host_lease(request)
            request.num_computed_tokens = published * unit_tokens

        # Store at once, even if the policy stores later. `NoStore` and the store limit of the request still apply.
        jobs: list[Job] = []
        stop = min(published, request.store_limit)
        if run is not None and stop and request.epoch == cache.epoch and not self._stores_nothing:
            jobs = self._stores.offer_with_windows(request, run, published, stop)
        held = {block_id for table in request.tables for block_id in table.ids if block_id}
        if request.checkpoints is not None:
            held.update(request.checkpoints.ids())
        self._request_leases.give_up_tables(request)
        if run is not None:
            host, starts = self._stores.destination, cache.layout.starts(run.stop)
            if cache.layout.recurrent is not None:
                starts[-1] = cache.last_checkpoint(host, run)
            request.leases[host] = cache.lease(host, run, starts)
            self._request_leases.lease_device_to(request, None)

        # The limit of `admit` applies only to the prompt. Units that the request itself has computed may always be
        # matched.
        request.hit_limit = max(request.hit_limit, request.num_computed_tokens // unit_tokens)
        request.published = request.ready_stop = 0
        if request.computing is Computing.ITS_BLOCKS:
            request.computing = Computing.LOST_BLOCKS
        self._moves.request(request, State.PREEMPTED)

        stores = [job for job in self._jobs.unsettled.values() if job.plan.source is Tier.DEVICE]
        read = {job.job_id: held.intersection(job.plan.source_ids) for job in stores}
        job_ids = tuple(job_id for job_id, blocks in read.items() if blocks)
        # The difference is negative if the stores pin blocks that were evictable, such as the margin before a window.
        num_freed = max(0, self._admission.num_available - before)
        return Preemption(num_freed, len(set().union(*read.values())), job_ids, tuple(job.plan for job in jobs))

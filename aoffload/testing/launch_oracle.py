"""The oracle of launches: which copies may begin, in which order, and how many at a time."""

from __future__ import annotations

import attrs

from .._common.tiers import Tier
from .._kernel.plans import TransferPlan
from .._kernel.states import Direction, JobState
from .._runtime.runtime import AnyRuntime
from .._transfer.copy_queue import JOBS_IN_FLIGHT
from .faults import Faults
from .transport import SimulatedTransport
from .violations import Violation

__all__ = ["LaunchOracle"]


@attrs.define(eq=False)
class LaunchOracle:
    """Its checks are called by the transport before each launch."""

    runtime: AnyRuntime
    faults: Faults
    _links: dict[int, tuple[Tier, Tier]] = attrs.field(factory=dict)
    """Source and destination of every job launched so far."""

    def check(self, transport: SimulatedTransport, plan: TransferPlan) -> None:
        """Check that the launch is legal. A runtime that closes launches nothing except stores, if it has a disk.
        Nothing is launched after a stall, or for a job that was discarded or queued before a reset. Loads go before
        stores. The in-flight bounds hold, except that a job larger than the byte bound goes alone."""
        stores_last = plan.direction is Direction.STORE and transport.disk is not None
        if not self.runtime._session.is_open and not (stores_last and self.runtime.worker.copies.is_accepting):
            raise Violation("launched while closing", repr(self.runtime))
        link = (plan.source, plan.destination)
        late = [job_id for job_id in self.runtime.worker.copies.overdue if self._links.get(job_id) == link]
        if late:
            raise Violation("launched behind a stall", f"{plan} behind jobs {sorted(late)}")
        self._links[plan.job_id] = link
        self._check_order(plan)
        if not self.faults.fired and not self._fits(transport, plan):
            raise Violation("too much in flight", f"{plan} beside {list(transport.in_flight)}")

    def _fits(self, transport: SimulatedTransport, plan: TransferPlan) -> bool:
        """Whether the bounds of its link allow this launch."""
        config = self.runtime.config
        on_disk = () if transport.disk is None else transport.disk.under_way.values()
        under_way = [copy.plan for copy in (*transport.in_flight.values(), *on_disk)]
        beside = [one for one in under_way if (one.source, one.destination) == (plan.source, plan.destination)]
        num_bytes = sum(other.num_blocks for other in (*beside, plan)) * transport.block_bytes
        return not beside or (
            len(beside) < (config.max_jobs_in_flight or JOBS_IN_FLIGHT) and num_bytes <= config.bytes_in_flight
        )

    def _has_room(self, plan: TransferPlan) -> bool:
        """Whether the bounds of its link allow a launch. A copy that has ended counts until it is settled. If it had
        ended when its launch returned, only its bytes count."""
        copies = self.runtime.worker.copies
        link = copies.link(plan.source, plan.destination)
        fits = link.num_bytes + plan.num_blocks * copies.block_bytes <= link.max_bytes
        return not link.in_flight or (fits and len(link.in_flight) - len(link.reported) < link.max_jobs)

    def _check_order(self, plan: TransferPlan) -> None:
        unsettled = self.runtime.ledger.jobs.unsettled
        job = unsettled.get(plan.job_id)
        if job is None or (type(job.epoch) is int and job.epoch < self.runtime.ledger.cache.epoch):
            raise Violation("a copy for nobody", f"{plan} was discarded, or queued before the cache was reset")
        loads = [job for job in unsettled.values() if job.plan.direction is Direction.LOAD]
        waiting = [job for job in loads if job.state is JobState.QUEUED and job.claims]
        if waiting and plan.direction is Direction.STORE and self._has_room(waiting[0].plan):
            raise Violation("a store before a load", f"{plan} before {waiting[0]}")

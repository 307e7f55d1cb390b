"""Whether vLLM should wait for copies that hold freed blocks, instead of preempting a request.

A store holds the blocks that it reads. If their request ends or is preempted meanwhile, vLLM gets these blocks back
only when the copy ends. Until then the pool looks fuller than it is, so a running request may find no block. vLLM then
asks `has_pending_block_frees`. After the answer True, the request waits for the next step, and so do the running
requests after it. After False, vLLM preempts a request, which later computes or loads its KV again.

A wait is worth it if a copy that was launched holds a block that nobody else refers to. It must not last:

- A copy that hangs frees nothing. So vLLM waits for `WAIT_S`, and then never waits again for a copy that was planned by
  then. It does not wait at all for a copy on a stalled link.
- A new request would take the blocks that come back. So none is matched in a step in which a running request waits. By
  itself, vLLM does the same in a step in which it preempts.

vLLM runs steps while requests wait, also steps that compute nothing. Each of them starts the copies that were launched
for it, and brings the reports of those that have ended. So no other event is needed to end a wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import attrs

from aoffload import HostCache, Tier

from ..ledger import CopyQueue, JobState, TransferPlan
from .blocks import EnginePool

WAIT_S = 0.1
"""The longest time for which a request waits for blocks. A preempted request costs about as much: a prompt of some
thousand tokens is computed again, or loaded."""
MIN_STEPS = 3
"""A wait lasts so many steps, even if they take longer: a copy starts after the forward of a step, ends during the next
one, and is reported with that one or, if vLLM schedules ahead, the one after it."""


@attrs.define(eq=False)
class PendingFrees:
    """One per engine. It does nothing before vLLM finds no block."""

    ledger: HostCache
    queue: CopyQueue
    pool: EnginePool
    clock: Callable[[], float]
    _step: int = attrs.field(default=0, init=False)
    """The step in which vLLM has asked last."""
    waits_in: int = attrs.field(default=-1, init=False)
    """The last step in which vLLM was told to wait."""
    _since: tuple[int, float] | None = attrs.field(default=None, init=False)
    """The step and the time at which vLLM began to wait. None: it does not wait."""
    _last_vain: int = attrs.field(default=0, init=False)
    """vLLM has waited in vain for copies up to this job."""

    def are_near(self, step: int) -> bool:
        """Whether a copy gives blocks back soon. `step`: the number of the step that vLLM schedules."""
        if step > self._step + 1:  # its last wait is over, because it had blocks in a step since
            self._since = None
        self._step = step
        if not any(map(self._frees_blocks, self._device_ids())):
            self._since = None
            return False
        now = self.clock()
        first_step, since = self._since = self._since or (step, now)
        if now - since <= WAIT_S or step - first_step < MIN_STEPS:
            self.waits_in = step
            return True
        self._last_vain, self._since = self.ledger.jobs.last_id, None
        return False

    def _device_ids(self) -> Iterator[array[int]]:
        """vLLM's blocks that each copy in flight holds."""
        for job_id, job in self.ledger.jobs.unsettled.items():
            if job.state is JobState.LAUNCHED and job_id > self._last_vain:
                plan: TransferPlan = job.plan
                if Tier.DEVICE in plan.link and not self.queue.is_stalled(*plan.link):
                    yield plan.source_ids if plan.source is Tier.DEVICE else plan.destination_ids

    def _frees_blocks(self, block_ids: array[int]) -> bool:
        return any(map(self.pool.is_private, block_ids))

"""Whether vLLM should wait for copies that hold freed blocks, instead of preempting a request.

A store holds the blocks that it reads. If the request of these blocks ends or is preempted meanwhile, vLLM gets the
blocks back only when the copy ends. Until then, a running request may find no free block. vLLM then asks
`has_pending_block_frees`. After the answer True, the request and the running requests after it wait for the next step.
After False, vLLM preempts a request, which later computes or loads its KV again.

The answer is True if a launched copy holds a block that has no other owner. Two rules bound the wait:

- A copy that hangs frees nothing. So vLLM waits for `WAIT_S` or `MIN_STEPS` steps, whichever is longer, and never again
  for a copy that was planned by then. vLLM does not wait for a copy on a stalled link.
- A new request would take the blocks that come back. So no request is matched in a step in which a running request
  waits. In a step in which vLLM preempts, vLLM itself starts no request either.

While requests wait, vLLM runs steps, even if they compute nothing. Each step starts the copies that were launched for
it, and brings the reports of copies that have ended. So no other event is needed to end a wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import attrs

from aoffload import HostCache, Tier

from ..ledger import CopyQueue, JobState, TransferPlan
from .blocks import EnginePool

WAIT_S = 0.1
"""How long a request waits for blocks, unless `MIN_STEPS` takes longer. A preemption costs about as much time, because
a prompt of some thousand tokens is computed again or loaded."""
MIN_STEPS = 3
"""The least number of steps of a wait, even if they take longer than `WAIT_S`. A copy starts after the forward of a
step and ends during the next step. That step reports the copy or, if vLLM schedules ahead, the step after it."""


@attrs.define(eq=False)
class PendingFrees:
    """One per engine. vLLM asks it only when a request finds no free block."""

    ledger: HostCache
    queue: CopyQueue
    pool: EnginePool
    clock: Callable[[], float]
    _step: int = attrs.field(default=0, init=False)
    """The step in which vLLM asked last."""
    waits_in: int = attrs.field(default=-1, init=False)
    """The last step in which vLLM was told to wait."""
    _since: tuple[int, float] | None = attrs.field(default=None, init=False)
    """The step and the time at which vLLM began to wait. None: it does not wait."""
    _last_vain: int = attrs.field(default=0, init=False)
    """The last job for which vLLM has waited in vain."""

    def are_near(self, step: int) -> bool:
        """Whether a copy gives blocks back soon. `step`: the number of the step that vLLM schedules."""
        if step > self._step + 1:  # vLLM has found blocks in a step since, so the last wait is over
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

"""The owner of each block while a soak runs: recorded by the pools, checked by forwards and copies.

A device block that changes hands is filled with garbage: a hit on it would be wrong bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from aoffload import OffloadRuntime
from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import NoEpoch
from aoffload._transfer.fences import Fence
from aoffload._transfer.local import LocalTransport
from aoffload.testing import Memory, Violation
from aoffload.testing.memory import OwnedPool

__all__ = ["OwnedBlocks", "OwnedTransport", "Owners"]


@attrs.frozen
class OwnedBlocks:
    """Blocks of a tier, with their owners at some moment."""

    memory: Memory
    block_ids: Sequence[int]
    generations: tuple[int, ...]

    def problem(self, who: str) -> str:
        """The first block with another owner by now; empty if there is none."""
        try:
            for block_id, generation in zip(self.block_ids, self.generations, strict=True):
                self.memory.check_owner(who, block_id, generation)
        except Violation as violation:
            return str(violation)
        return ""


class Owners:
    """The owners of all blocks of a runtime, in both tiers. Make it before the runtime is entered."""

    def __init__(self, runtime: OffloadRuntime, spoil: Callable[[Sequence[int]], None]) -> None:
        self._unsettled = runtime.ledger.jobs.unsettled
        self._memories: dict[Tier, Memory] = {}
        for tier in runtime.ledger.cache.tiers:
            first = 1 if tier.tier is Tier.DEVICE else 0  # the null block has no owner
            memory = self._memories[tier.tier] = Memory(tier.tier, tier.pool.num_blocks + first)
            tier.pool = OwnedPool(tier.pool, memory, spoil if tier.tier is Tier.DEVICE else _nothing)

    def owned(self, tier: Tier, block_ids: Sequence[int]) -> OwnedBlocks:
        """These blocks with their current owners."""
        memory = self._memories[tier]
        return OwnedBlocks(memory, list(block_ids), memory.generations(block_ids))

    def is_doomed(self, job_id: int) -> bool:
        """Whether the job will publish nothing, since it was given up: its source may have another owner."""
        job = self._unsettled.get(job_id)
        return job is None or job.epoch is NoEpoch.INVALIDATED


def _nothing(block_ids: array[int]) -> None:
    """Host blocks are not spoiled: their memory belongs to the transport."""


class OwnedTransport(LocalTransport):
    """Checks at the end of each copy that its source and destination blocks have kept their owners since its launch."""

    def __init__(self, kv_caches: object, backend: Any, report: Callable[[str], None]) -> None:
        super().__init__(kv_caches, backend)
        self.owners: Owners | None = None
        self._report = report
        self._held: dict[int, tuple[OwnedBlocks, OwnedBlocks]] = {}

    def open(self, num_host_blocks: int, *, deliver: Callable[[Completion], None], **options: Any) -> None:
        def over(completion: Completion) -> None:
            if sides := self._held.pop(completion.job_id, None):
                self._check_hands(completion.job_id, *sides)
            deliver(completion)

        super().open(num_host_blocks, deliver=over, **options)

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        if self.owners is not None:
            source = self.owners.owned(plan.source, plan.source_ids)
            self._held[plan.job_id] = source, self.owners.owned(plan.destination, plan.destination_ids)
        super().launch(plan, after)

    def _check_hands(self, job_id: int, source: OwnedBlocks, destination: OwnedBlocks) -> None:
        """Check both sides. `is_doomed` is asked last: a job is doomed before its source is freed."""
        assert self.owners is not None
        if problem := destination.problem(f"job {job_id}"):
            self._report(problem)
        if (problem := source.problem(f"job {job_id}")) and not self.owners.is_doomed(job_id):
            self._report(problem)

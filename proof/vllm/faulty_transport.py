"""A transport that counts copies, and makes loads fail."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import attrs

from aoffload.ledger import Completion, Direction, Outcome, TransferPlan

__all__ = ["Ending", "FailingTransport"]


class Ending(enum.Enum):
    """How a load ends."""

    WELL = "well"
    FAILED = "failed"
    """Nothing of it was copied."""
    HALF = "half"
    """Its first half was copied."""
    UNPROVEN = "unproven"
    """It may still be writing, and it is: what it writes comes with `release`, and then the proof."""
    HUNG = "hung"
    """Nothing is heard of it; it writes and ends with `release`."""


class FailingTransport:
    """`inner`, with every load ended as `ending_of(number of loads before it)` says."""

    def __init__(self, inner: Any, ending_of: Callable[[int], Ending]) -> None:
        self.inner, self._ending_of = inner, ending_of
        self.num_loads = self.num_stores = 0
        self.blocks_loaded = self.blocks_stored = 0
        self.num_failed_loads = 0
        self._late: list[TransferPlan] = []
        self._halved: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Any) -> None:
        self._deliver = deliver
        self.inner.open(num_host_blocks, verify=verify, deliver=self._over, env=env)

    def _over(self, completion: Completion) -> None:
        if completion.job_id in self._halved:
            completion = attrs.evolve(completion, outcome=Outcome.FAILED, error="failed on purpose")
        self._deliver(completion)

    def launch(self, plan: TransferPlan, after: Any) -> None:
        if plan.direction is Direction.STORE:
            self.num_stores += 1
            self.blocks_stored += plan.num_blocks
            self.inner.launch(plan, after)
            return
        ending = self._ending_of(self.num_loads)
        self.num_loads += 1
        self.blocks_loaded += plan.num_blocks
        self.num_failed_loads += ending is not Ending.WELL
        self._end(plan, after, ending)

    def _end(self, plan: TransferPlan, after: Any, ending: Ending) -> None:
        half = plan.num_blocks // 2
        if ending is Ending.WELL:
            self.inner.launch(plan, after)
        elif ending is Ending.HALF and half:
            self._halved.add(plan.job_id)
            ids = {"source_ids": plan.source_ids[:half], "destination_ids": plan.destination_ids[:half]}
            self.inner.launch(attrs.evolve(plan, **ids), after)
        elif ending in (Ending.FAILED, Ending.HALF):
            self._deliver(Completion(plan.job_id, Outcome.FAILED, error="failed on purpose"))
        else:
            self._late.append(plan)
            if ending is Ending.UNPROVEN:
                self._deliver(Completion(plan.job_id, Outcome.UNPROVEN, error="failed on purpose"))

    def release(self) -> int:
        """Let everything that is still under way write its bytes, and prove it. Returns the number of loads."""
        late, self._late = self._late, []
        for plan in late:
            self.inner.launch(plan, None)
        return len(late)

    @property
    def num_late(self) -> int:
        return len(self._late)

    def tamper(self) -> None:
        """Change some numbers in the middle of every block in host memory. Call it while nothing is copied."""
        host = self.inner.backend._host  # there is no public way to harm it
        middle = host.shape[1] // 8 * 4
        host[:, middle + 3 : middle + 256 : 4] ^= 0x82  # of floats: the sign, and a factor of 16

"""A copy in progress between two simulated memories."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from .._kernel.plans import Completion, TransferPlan
from .._kernel.states import Outcome
from .memory import Memory

__all__ = ["LATE_S", "Copy", "otherwise"]

LATE_S = 0.7
"""Delay of a late proof: longer than any copy, shorter than any timeout."""


@attrs.define(eq=False)
class Copy:
    """One launched plan in progress."""

    plan: TransferPlan
    source: Memory
    destination: Memory
    source_generations: tuple[int, ...]
    destination_generations: tuple[int, ...]
    is_doomed: Callable[[], bool]
    """Whether it will publish nothing, because it was given up or its bytes are wrong. Its source may have another
    owner."""
    num_moved: int = 0
    is_told: bool = False
    """Its completion was delivered. It may still write."""

    @property
    def name(self) -> str:
        return f"{self.plan.direction.value} {self.plan.job_id}"

    def move(self, stop: int) -> None:
        """Copy blocks up to `stop`. The destinations must be the job's own. So must the sources, until its completion
        is delivered."""
        for index in range(self.num_moved, stop):
            source_id, destination_id = self.plan.source_ids[index], self.plan.destination_ids[index]
            self.destination.check_owner(self.name, destination_id, self.destination_generations[index])
            if not self.is_told and not self.is_doomed():
                self.source.check_owner(self.name, source_id, self.source_generations[index])
            self.destination.content[destination_id] = self.source.content[source_id]
        self.num_moved = max(self.num_moved, stop)


def otherwise(completion: Completion) -> Completion:
    """A second completion that contradicts the first: LANDED and FAILED are swapped. UNPROVEN is repeated, because
    another outcome would be a late proof. So is CORRUPT."""
    if completion.outcome is Outcome.FAILED:
        return Completion(completion.job_id, Outcome.LANDED, completion.num_landed + 1)
    if completion.outcome is Outcome.LANDED:
        return Completion(completion.job_id, Outcome.FAILED, error="told otherwise")
    return completion

"""The oracle of the wait queue: requests wait only for blocks that are not free, and in order."""

from __future__ import annotations

import attrs

from .._common.tiers import Tier
from .._extensions.assembly import Ledger
from .._kernel.index import Hit, find_hit, is_branch_point
from .._kernel.records import LedgerRequest, Waiter
from .._runtime.runtime import AnyRuntime
from .violations import Violation

__all__ = ["LineOracle"]


@attrs.frozen
class LineOracle:
    """Watches the wait queue of one runtime."""

    runtime: AnyRuntime

    def check(self) -> None:
        if not isinstance(self.runtime.ledger, Ledger):
            return  # an engine's blocks: no request waits for them here
        line = self.runtime.ledger.admission.queue
        tickets = [waiter.request.ticket for waiter in line.allocating]
        if tickets != sorted(tickets):
            raise Violation("out of turn", f"the line is {line.allocating}")
        admission = self.runtime.ledger.admission
        for waiter in (*line.extending, *line.allocating):
            if admission.num_least(waiter) > admission.capacity:
                raise Violation("a wait in vain", f"{waiter} can never fit")
        if line.extending:
            self._check_extension(line.extending[0])
        elif line.allocating:
            self._check_allocation(line.allocating[0])

    def _check_extension(self, first: Waiter) -> None:
        admission = self.runtime.ledger.admission
        if admission.num_missing(first.request, first.num_units) <= admission.num_available:
            raise Violation("a wait without a need", f"{first} waits and there is room")
        if not admission.others_hold_blocks():
            raise Violation("a wait without a need", f"{first} waits, and only waiters hold room")
        if pinning := [waiter for waiter in admission.queue.allocating if waiter.request.leases]:
            raise Violation("a wait without a need", f"{first} waits for what {pinning[0]} pins, which has nothing yet")

    def _check_allocation(self, first: Waiter) -> None:
        admission = self.runtime.ledger.admission
        hit = self._hit(first.request)
        missing = max(0, first.num_units - hit.device_stop) * self._width + self._in_checkpoints(first.request, hit)
        if admission.num_missing(first.request, first.num_units) <= admission.num_available:
            raise Violation("a wait without a need", f"{first} waits and there is room")
        if missing <= admission.num_available - self._evictable_of(hit):
            raise Violation("a wait without a need", f"{first} waits; matched again it would fit")
        if not admission.others_hold_blocks():
            raise Violation("a wait without a need", f"{first} waits, and only waiters and pins hold room")

    @property
    def _width(self) -> int:
        return int(self.runtime.ledger.layout.width)

    def _hit(self, record: LedgerRequest) -> Hit:
        """The hit that `record` would match now."""
        cache = self.runtime.ledger.cache
        if record.epoch != cache.epoch:
            return Hit(0, 0, ())
        limit = min((record.sequence.num_tokens - 1) // cache.layout.unit_tokens, record.hit_limit)
        return find_hit(cache.index, record.sequence, cache.layout, limit, record.hit_alignment)

    def _in_checkpoints(self, record: LedgerRequest, hit: Hit) -> int:
        """Blocks that the checkpoints of `record` take after `hit`, if there is room for all of them: one that is
        loaded, one at the end of the prompt, and one at the branch."""
        layout = self.runtime.ledger.layout
        if layout.recurrent is None:
            return 0
        is_branch = record.has_committed or is_branch_point(self.runtime.ledger.cache.index, record.sequence, hit)
        branch = hit.full_stop if is_branch else 0
        ends = ((record.sequence.num_prompt_tokens - 1) // layout.unit_tokens, branch)
        planned = {end for end in (end - end % record.hit_alignment for end in ends) if end > hit.stop}
        return (len(planned) + (hit.stop > hit.device_stop)) * int(layout.recurrent.width)

    def _evictable_of(self, hit: Hit) -> int:
        """Evictable blocks of `hit`. Pinning it makes them unavailable."""
        unpinned = [run for run in hit.path if not run.parts[Tier.DEVICE].num_references]
        found = sum(max(0, min(run.stop, hit.device_stop) - run.start) for run in unpinned) * self._width
        recurrent = self.runtime.ledger.layout.recurrent
        if recurrent is not None:
            parts = [run.part(Tier.DEVICE, recurrent.number) for run in hit.path]
            found += sum(len(part.blocks) for part in parts if not part.num_references)
        return found

"""The fences of ended steps, so that a load waits only for the steps that used its destinations.

See `aoffload.core.last_uses` for the other half: which step that was.
"""

from __future__ import annotations

from collections import deque

import attrs

from .transfer.fence import PASSED, Fence, OnlyAfter

__all__ = ["StepFences"]


@attrs.define(eq=False)
class StepFences:
    """Ended steps whose fences may not have passed yet, by number, the oldest first."""

    _pending: deque[tuple[int, Fence | None]] = attrs.field(factory=deque)
    """A fence is None if none could be recorded. The next fence that is recorded is later, and replaces it."""

    def ended(self, number: int, fence: Fence | None) -> None:
        """Step `number` has ended; `fence` is after all compute so far."""
        if fence is not None:
            pending = self._pending
            while pending and pending[-1][1] is None:
                number = pending.pop()[0]  # the fence also covers the earlier steps that have none
        if fence is not PASSED:
            self._pending.append((number, fence))
        self._forget_passed()

    def before_load(self, number: int) -> OnlyAfter | None:
        """The fences for a load whose destinations were used by steps up to `number`. None: the load has to wait for
        all compute so far, because the steps are unknown (0), or one of them has no fence."""
        self._forget_passed()
        found = [fence for step, fence in self._pending if step <= number]
        fences = tuple([fence for fence in found if fence is not None])
        return OnlyAfter(fences) if number and len(fences) == len(found) else None

    def _forget_passed(self) -> None:
        pending = self._pending
        while pending and (fence := pending[0][1]) is not None and _has_passed(fence):
            pending.popleft()


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.query()
    except Exception:  # noqa: BLE001 - a driver error: the load that waits for this fence meets it
        return False

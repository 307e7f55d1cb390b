"""The fences with which steps ended, for loads that wait only for those who used their destinations.

See `aoffload.core.last_uses` for the other half: which step that was.
"""

from __future__ import annotations

from collections import deque

import attrs

from .transfer.fence import PASSED, Fence, OnlyAfter

__all__ = ["StepFences"]


@attrs.define(eq=False)
class StepFences:
    """The last steps by number, in the order in which they ended, until their fences are known to have passed."""

    _pending: deque[tuple[int, Fence | None]] = attrs.field(factory=deque)
    """None: no fence could be recorded. The next one that can be is later, and stands for it."""

    def ended(self, number: int, fence: Fence | None) -> None:
        """Step `number` ends with `fence`, which is behind all compute so far."""
        if fence is not None:
            pending = self._pending
            while pending and pending[-1][1] is None:
                number = pending.pop()[0]  # from the first one without a fence on
        if fence is not PASSED:
            self._pending.append((number, fence))
        self._forget_passed()

    def before_load(self, number: int) -> OnlyAfter | None:
        """What a load waits for whose destinations were touched by steps up to `number`. None: by all compute so far,
        because it is not known what has touched them, or a fence is missing."""
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

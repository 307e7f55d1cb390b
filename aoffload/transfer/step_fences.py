"""The fences of ended steps, so that a load waits only for the steps that used its destinations.

See `aoffload.core.last_uses` for the other half: which step that was.
"""

from __future__ import annotations

from collections import deque

import attrs

from .fence import PASSED, Fence, OnlyAfter

__all__ = ["StepFences"]


@attrs.define(eq=False)
class StepFences:
    """The fences of ended steps, for whoever drives a `Ledger`. Call `ended` before a step ends, and give `before_load`
    what `Ledger.last_step` says of a load. For the ledger's thread."""

    _pending: deque[tuple[int, Fence | None]] = attrs.field(init=False, factory=deque)
    """Ended steps whose fences may not have passed yet, by number, the oldest first. A fence is None if none could be
    recorded. The next fence that is recorded is later, and replaces it."""
    _last: int = attrs.field(init=False, default=0)
    """The number of the last step that has ended."""

    def ended(self, number: int, fence: Fence | None) -> None:
        """Step `number`, which is `Ledger.num_steps_ended + 1`, ends with `fence`, which is after all compute so far.
        None: no fence could be recorded."""
        if number > self._last + 1:
            self._pending.append((self._last + 1, None))  # steps that nobody has told of
        self._last = max(self._last, number)
        if fence is not None:
            while self._pending and self._pending[-1][1] is None:
                number = self._pending.pop()[0]  # the fence also covers the earlier steps that have none
        if fence is not PASSED:
            self._pending.append((number, fence))
        self._forget_passed()

    def before_load(self, number: int) -> OnlyAfter | None:
        """The fences for a load whose destinations were used by steps up to `number`. None: the load has to wait for
        all compute so far, because the steps are unknown (0), or one of them has no fence."""
        self._forget_passed()
        found = [fence for step, fence in self._pending if step <= number]
        fences = tuple([fence for fence in found if fence is not None])
        return OnlyAfter(fences) if 0 < number <= self._last and len(fences) == len(found) else None

    def _forget_passed(self) -> None:
        """Forget the oldest fences, as far as they have passed. The next fence replaces one that is broken."""
        pending = self._pending
        while pending:
            number, fence = pending[0]
            if fence is None:
                if len(pending) == 1:
                    return
                pending.popleft()
                pending[0] = number, pending[0][1]
                continue
            try:
                has_passed = fence.query()
            except Exception:  # noqa: BLE001 - a driver error: nothing can be learned from this fence any more
                pending[0] = number, None
                continue
            if not has_passed:
                return
            pending.popleft()

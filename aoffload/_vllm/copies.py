"""The copies of one rank: those under way, and those that are over and not reported yet."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import attrs

from aoffload import Tier

from ..ledger import Completion, Outcome, TransferPlan

__all__ = ["RankCopies"]


class RankCopies:
    """`end` is called from any thread, all else from the one that runs the model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._under_way: set[int] = set()
        """Jobs that touch vLLM's tensors, were launched and are not proven to be over."""
        self._loads: set[int] = set()
        """Loads into vLLM's tensors of which no proof was reported."""
        self._lost: set[int] = set()
        """Those whose destination has lost its memory: where they end, nothing has landed."""
        self._over: deque[Completion] = deque()
        self._ended = threading.Condition()

    def begin(self, plan: TransferPlan) -> None:
        """Before it is launched: its end may come before the launch returns."""
        if Tier.DEVICE not in plan.link:
            return  # whatever becomes of the tensors, it goes on
        with self._ended:
            self._under_way.add(plan.job_id)
            if plan.destination is Tier.DEVICE:
                self._loads.add(plan.job_id)

    def end(self, completion: Completion) -> None:
        with self._ended:
            self._over.append(completion)
            if completion.outcome is not Outcome.UNPROVEN:
                self._under_way.discard(completion.job_id)
            self._ended.notify_all()

    def take(self) -> tuple[Completion, ...]:
        """What has ended since the last call."""
        if not self._over:
            return ()  # as in most steps
        with self._ended:
            found = tuple(self._over)
            self._over.clear()
            return tuple([self._told(completion) for completion in found])

    def _told(self, completion: Completion) -> Completion:
        if completion.job_id in self._lost:
            problem = completion.error or "the memory that it was loaded into is gone"
            outcome = Outcome.FAILED if completion.outcome is Outcome.LANDED else completion.outcome
            completion = attrs.evolve(completion, outcome=outcome, num_landed=0, error=problem)
        if completion.outcome is not Outcome.UNPROVEN:
            self._loads.discard(completion.job_id)
            self._lost.discard(completion.job_id)
        return completion

    def lose_loads(self) -> None:
        """The memory that loads were copied into goes away: those that were not reported have brought nothing."""
        with self._ended:
            self._lost |= self._loads

    def wait(self, timeout_s: float) -> bool:
        """Wait for what is under way, `timeout_s` of the clock at most. Returns whether all of it is over."""
        deadline = self.clock() + timeout_s
        with self._ended:
            while self._under_way and (left := deadline - self.clock()) > 0:
                self._ended.wait(min(left, threading.TIMEOUT_MAX))
            return not self._under_way

    def wait_for_any(self, timeout_s: float) -> None:
        """Wait until something has ended that was not reported, `timeout_s` at most."""
        with self._ended:
            if not self._over:
                self._ended.wait(min(timeout_s, threading.TIMEOUT_MAX))

    def doubt(self, reason: str) -> None:
        """Report what is under way as UNPROVEN: it may still copy. Its end, if it comes, is the late proof."""
        with self._ended:
            self._over += [Completion(job_id, Outcome.UNPROVEN, error=reason) for job_id in sorted(self._under_way)]

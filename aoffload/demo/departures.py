"""Clients that leave: a client's own scope is cancelled at a seeded point, whatever the request's state is then."""

from __future__ import annotations

import random

import anyio
import anyio.abc
import anyio.lowlevel
import attrs

__all__ = ["Departures"]

MAX_PASSES = 40
"""The most passes of the event loop after which a client leaves while it waits for room or loads."""
MAX_STEPS = 60
"""The most engine steps after which a client leaves while it computes."""


@attrs.define(eq=False)
class Departures:
    """Which clients leave and when: after some passes of the event loop or engine steps. Too late has no effect."""

    rate: float
    tasks: anyio.abc.TaskGroup
    _random: random.Random
    _num_steps: int = 0
    _due: dict[anyio.CancelScope, int] = attrs.field(factory=dict)

    @classmethod
    def seeded(cls, rate: float, seed: int, tasks: anyio.abc.TaskGroup) -> Departures:
        return cls(rate, tasks, random.Random(f"departures {seed}"))

    def arrange(self, scope: anyio.CancelScope) -> None:
        """Perhaps cancel `scope` later on."""
        if self._random.random() >= self.rate:
            return
        if self._random.random() < 0.5:
            self.tasks.start_soon(_leave_after, self._random.randint(1, MAX_PASSES), scope)
        else:
            self._due[scope] = self._num_steps + self._random.randint(1, MAX_STEPS)

    def forget(self, scope: anyio.CancelScope) -> None:
        """Do not cancel `scope` any more: its client is done, or gone."""
        self._due.pop(scope, None)

    def step_done(self, num_steps: int) -> None:
        """Called by the engine after every step."""
        self._num_steps = num_steps
        for scope, due in list(self._due.items()):
            if num_steps >= due:
                del self._due[scope]
                scope.cancel()


async def _leave_after(num_passes: int, scope: anyio.CancelScope) -> None:
    for _ in range(num_passes):
        await anyio.lowlevel.checkpoint()
    scope.cancel()

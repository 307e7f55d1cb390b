"""Connectors whose stores end some steps late, the same number of steps in every run: ours and vLLM's own.

A store reads its blocks when it ends. So if anybody reuses the blocks before that, the host gets wrong bytes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from aoffload.integrations.vllm import AoffloadConnector
from aoffload.ledger import Direction, TransferPlan
from aoffload.transport import Fence

from .one_thread import WaitingTransport
from .peer import Copies, CPUPeer

__all__ = ["NUM_STEPS", "SlowOurs", "SlowPeer", "StuckOurs"]

NUM_STEPS = 8
"""Steps of the engine from the one that begins a store to the one that ends it."""


class SlowTransport(WaitingTransport):
    """Copies in the calling thread. Stores wait for their step."""

    def __init__(self, regions: Any, num_steps: int) -> None:
        super().__init__(regions)
        self._step, self._num_steps = 0, num_steps
        self._late: list[tuple[int, TransferPlan]] = []

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        if plan.direction is Direction.STORE:
            self._late.append((self._step + self._num_steps, plan))
        else:
            super().launch(plan, after)

    def end_step(self) -> None:
        self._step += 1
        due = [plan for step, plan in self._late if step <= self._step]
        self._late = [(step, plan) for step, plan in self._late if step > self._step]
        for plan in due:
            super().launch(plan, None)


class SlowOurs(AoffloadConnector):  # type: ignore[misc]
    transport: SlowTransport
    num_steps: ClassVar[int] = NUM_STEPS

    def make_transport(self, regions: Any) -> SlowTransport:
        self.transport = SlowTransport(regions, self.num_steps)
        return self.transport

    def wait_for_save(self) -> None:
        self.transport.end_step()
        super().wait_for_save()


class StuckOurs(SlowOurs):
    """No store ever ends."""

    num_steps = 10**9


@attrs.define(eq=False)
class _LateStore:
    """The event of a store that is made when it is due, or when somebody waits for it."""

    copies: SlowCopies
    due: int
    blocks: tuple[list[int], list[int]] | None

    def query(self) -> bool:
        if self.copies.step >= self.due:
            self.synchronize()
        return self.blocks is None

    def synchronize(self) -> None:
        blocks, self.blocks = self.blocks, None
        if blocks is not None:
            self.copies.store(*blocks)


class SlowCopies(Copies):
    step = 0

    def wait_for_save(self) -> None:
        self.step += 1
        found = self._connector_metadata
        if found is not None and found.store_gpu_blocks:
            event = _LateStore(self, self.step + NUM_STEPS, (found.store_gpu_blocks, found.store_cpu_blocks))
            self._store_events.append((found.store_event, event))


class SlowPeer(CPUPeer):
    copies_class = SlowCopies

"""Backends that fail, hang, die, come late or tamper, and a fence that a test opens."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import torch
from copies import GUARD_S
from numpy.typing import NDArray

from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Direction
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.fences import Fence


def numbered_pool(num_blocks: int = 8) -> torch.Tensor:
    """Block `b` is full of `b`."""
    return torch.arange(num_blocks, dtype=torch.int32)[:, None].repeat(1, 6)


@attrs.define(eq=False)
class GateFence:
    """A fence that another thread opens; it may break instead."""

    gate: threading.Event = attrs.field(factory=threading.Event)
    is_waited_for: threading.Event = attrs.field(factory=threading.Event)
    error: Exception | None = None

    def query(self) -> bool:
        return self.gate.is_set()

    def synchronize(self) -> None:
        self.is_waited_for.set()
        assert self.gate.wait(GUARD_S)
        if self.error is not None:
            raise self.error


class FailingBackend(CpuBackend):
    """Copies two blocks per batch and raises before the batch that holds host block 4."""

    failure: type[BaseException] = OSError

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self._blocks_per_batch = 2

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        if 4 in on_host:
            raise self.failure("the cable fell out")
        super().copy_batch(direction, on_device, on_host)


class DyingBackend(FailingBackend):
    failure = SystemExit


class HangingBackend(CpuBackend):
    """Every copy waits for `resume`."""

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self.entered = threading.Event()
        self.resume = threading.Event()

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        self.entered.set()
        assert self.resume.wait(GUARD_S)
        super().copy_batch(direction, on_device, on_host)


class LateFenceBackend(CpuBackend):
    """Copies like a device: `copy` returns at once, and the bytes move when the test opens the plan's fence."""

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self.fences: dict[int, GateFence] = {1: GateFence(), 2: GateFence(), 3: GateFence()}
        self.started = {1: threading.Event(), 2: threading.Event(), 3: threading.Event()}
        self.settle_error: Exception | None = None

    def copy(self, plan: TransferPlan) -> Fence:
        self.started[plan.job_id].set()
        if plan.job_id == 3:
            raise RuntimeError("no third copy")
        super().copy(plan)
        return self.fences[plan.job_id]

    def settle(self, direction: Direction) -> None:
        if self.settle_error is not None:
            raise self.settle_error


class ExchangingBackend(CpuBackend):
    """Exchanges the first two loaded blocks at the moment that a test chooses."""

    moment = "after_copy"

    def after_copy(self, plan: TransferPlan) -> None:
        self._exchange(plan, "after_copy")

    def after_verify(self, plan: TransferPlan) -> None:
        self._exchange(plan, "after_verify")

    def _exchange(self, plan: TransferPlan, moment: str) -> None:
        if plan.direction is Direction.LOAD and moment == self.moment:
            one, other = plan.destination_ids[:2]
            blocks = self.device_block(one), self.device_block(other)
            self.write_device_block(one, blocks[1])
            self.write_device_block(other, blocks[0])


class UnreadableBackend(CpuBackend):
    def device_block(self, block_id: int) -> NDArray[np.uint8]:
        raise OSError("cannot be read back")

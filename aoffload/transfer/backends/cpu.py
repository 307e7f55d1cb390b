"""Copies between CPU tensors and host memory, with numpy alone: torch's thread count belongs to the engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...core.plan import Direction, TransferPlan
from ..fence import PASSED, Fence
from ..region import KVRegion, byte_rows
from .base import CopyStopped, RegionBackend, anonymous_memory, device_ids, host_ids
from .rows import row_mover, stretches

__all__ = ["CpuBackend"]

BATCH_BYTES = 32 * 2**20
"""Moved by one call: long enough to hide what a call costs, short enough to say how far a copy came."""


class CpuBackend(RegionBackend):
    """The pool is ordinary memory: a copy is over when the call returns, and so is all compute of the caller."""

    def __init__(self, regions: tuple[KVRegion, ...]) -> None:
        super().__init__(regions)
        self._rows = [byte_rows(region).numpy() for region in regions]
        self._mover = row_mover(regions)
        self._blocks_per_batch = max(1, BATCH_BYTES // self.block_bytes)
        self._host = anonymous_memory(0, self.block_bytes)

    def open(self, num_host_blocks: int) -> None:
        self._host = anonymous_memory(num_host_blocks, self.block_bytes)

    def close(self) -> None:
        self._host = anonymous_memory(0, self.block_bytes)

    def record_fence(self) -> Fence:
        return PASSED

    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None:
        for fence in fences:
            fence.synchronize()

    def copy(self, plan: TransferPlan) -> Fence:
        on_device, on_host = device_ids(plan), host_ids(plan)
        for start in range(0, plan.num_blocks, self._blocks_per_batch):
            batch = slice(start, start + self._blocks_per_batch)
            try:
                self.copy_batch(plan.direction, on_device[batch], on_host[batch])
            except Exception as error:  # whatever it was: the batches before it arrived, and this one is over
                raise CopyStopped(start) from error
        return PASSED

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """Copy a few blocks, ids checked, one call per stretch of neighbours in host memory."""
        move = self._mover.scatter if direction is Direction.LOAD else self._mover.gather
        for part in stretches(on_host):
            first = int(on_host[part.start])
            move(on_device[part], self._host[first : first + part.stop - part.start])

    def settle(self, direction: Direction) -> None:
        """Nothing to wait for: calls that copy return when they are done."""

    def device_block(self, block_id: int) -> NDArray[np.uint8]:
        return np.concatenate([rows[block_id] for rows in self._rows])

    def write_device_block(self, block_id: int, block: NDArray[np.uint8]) -> None:
        offset = 0
        for rows in self._rows:
            rows[block_id] = block[offset : offset + rows.shape[1]]
            offset += rows.shape[1]

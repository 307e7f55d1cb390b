"""Copies between CPU tensors and host memory, with numpy alone: torch's thread count belongs to the engine."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._common.tiers import DEVICE
from ..._kernel.plans import TransferPlan
from ..._kernel.states import LOAD, STORE, Direction
from ...errors import ConfigError
from ..fences import PASSED, Fence, RegionFences
from ..region import KVRegion, byte_rows
from ..shared_memory import map_rows
from .base import CopyStopped, RegionBackend, anonymous_memory, device_ids, host_ids, host_size
from .rows import (
    LockWaits,
    RegionColumns,
    RowMover,
    Stripes,
    columns_of,
    element_type,
    gaps,
    pieces_of,
    row_mover,
    stretches,
)

STAGE_BYTES = 8 * 2**20


@attrs.frozen(eq=False)
class Staging:
    """Copies every byte twice, which is still faster for short stretches under GIL contention."""

    mover: RowMover
    host: NDArray[np.uint8]
    stage: NDArray[np.uint8]
    """`uint8 [blocks that fit, block_bytes]`, used by one direction only."""

    def move(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """Copy blocks, whose ids are checked, with two calls for as many as fit into the buffer."""
        element = element_type(self.host.shape[1])
        host, stage = self.host.view(element), self.stage.view(element)
        for start in range(0, len(on_host), len(stage)):
            part = slice(start, start + len(stage))
            num_blocks = len(on_host[part])
            if direction is LOAD:
                np.take(host, on_host[part], axis=0, out=stage[:num_blocks], mode="clip")
                self.mover.scatter(on_device[part], [self.stage[:num_blocks]])
            else:
                self.mover.gather(on_device[part], [self.stage[:num_blocks]])
                host[on_host[part]] = stage[:num_blocks]


BATCH_BYTES = 32 * 2**20
"""Bytes per batch: enough to hide the cost of a call, few enough to tell how many blocks of a failed copy arrived."""
SHORT_CALL_BYTES = 768 * 1024
"""Bytes per call. Below it, waiting for the GIL after each call takes longer than copying everything twice."""
LEAST_TIMED_BYTES = 64 * 1024
"""A smaller batch is not timed: asking for the thread's CPU time would take longer than copying it."""
MOST_TRIES = 8


class CpuBackend(RegionBackend):
    """Backend for CPU tensors: a copy is over when its call returns, and so is all compute of the caller."""

    def __init__(self, regions: tuple[KVRegion, ...]) -> None:
        super().__init__(regions)
        self._rows = [byte_rows(region).numpy() for region in regions]
        self._mover: RowMover = row_mover(regions)
        self._blocks_per_batch = max(1, BATCH_BYTES // self.block_bytes)
        self._waits = {direction: LockWaits() for direction in Direction}
        self._host = anonymous_memory(0, self.block_bytes)
        self._staging: dict[Direction, Staging] = {}
        self._columns: tuple[RegionColumns, ...] = ()

    def open(self, num_host_blocks: int) -> None:
        host_size(num_host_blocks, self.block_bytes)
        num_staged = max(1, STAGE_BYTES // self.block_bytes) * len(Direction)
        if self.shared_path:
            memory = self._host = map_rows(self.shared_path, num_host_blocks, self.block_bytes)
            staged = anonymous_memory(num_staged, self.block_bytes)
        else:
            memory = self._memory(num_host_blocks + num_staged)
            self._host, staged = memory[:num_host_blocks], memory[num_host_blocks:]
        if self._spans(memory):
            self._mover = Stripes.of(pieces_of(self.regions), divide=memory.ctypes.data)
        self._columns = columns_of(self.regions, self._host)
        stages = np.split(staged, len(Direction))
        for direction, stage in zip(Direction, stages, strict=True):
            self._staging[direction] = Staging(self._mover, self._host, stage)

    @property
    def host_rows(self) -> NDArray[np.uint8]:
        return self._host

    def close(self) -> None:
        self._host = anonymous_memory(0, self.block_bytes)
        self._staging, self._columns = {}, ()

    def record_fence(self) -> Fence:
        return PASSED

    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None:
        for fence in fences:
            fence.synchronize()

    def copy(self, plan: TransferPlan) -> Fence:
        watched = self._watched.pop(plan.job_id, None) if self._watched else None
        if watched is not None:
            return self._copy_by_region(plan, watched)
        on_device, on_host = device_ids(plan), host_ids(plan)
        direction = LOAD if plan.destination is DEVICE else STORE
        for start in range(0, len(on_device), self._blocks_per_batch):
            batch = slice(start, start + self._blocks_per_batch)
            try:
                self.copy_batch(direction, on_device[batch], on_host[batch])
            except Exception as error:  # any error: earlier batches arrived, and this one is over
                raise CopyStopped(start) from error
        return PASSED

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """Copy a few blocks, whose ids are checked, with one call per stretch of consecutive host blocks.

        While other threads contend for the GIL, short stretches are copied together, through a buffer.
        """
        waits, num_bytes = self._waits[direction], len(on_host) * self.block_bytes
        num_calls = 1 + int(np.count_nonzero(gaps(on_host))) if waits.have_begun else 0
        is_staged = num_bytes < num_calls * SHORT_CALL_BYTES
        extents: list[NDArray[np.uint8]] = []
        if not is_staged:
            for part in stretches(on_host):
                first = int(on_host[part.start])
                extents.append(self._host[first : first + part.stop - part.start])
        if num_bytes < LEAST_TIMED_BYTES:
            self._move(direction, on_device, on_host, extents)
        else:
            with waits.timing(len(extents) or 1):
                self._move(direction, on_device, on_host, extents)

    def _move(
        self,
        direction: Direction,
        on_device: NDArray[np.int64],
        on_host: NDArray[np.int64],
        extents: list[NDArray[np.uint8]],
    ) -> None:
        """Copy between `on_device` and `extents`. Without extents, copy through the buffer."""
        if not extents:
            self._staging[direction].move(direction, on_device, on_host)
        elif direction is LOAD:
            self._mover.scatter(on_device, extents)
        else:
            self._mover.gather(on_device, extents)

    def _copy_by_region(self, plan: TransferPlan, watched: RegionFences) -> Fence:
        """Copy the regions in the order in which a forward needs them."""
        on_device, on_host = device_ids(plan), host_ids(plan)
        try:
            for index in range(self.num_regions):
                self.copy_region(index, on_device, on_host)
                watched.give(index, PASSED)
        except Exception as error:  # any error: a forward that waits for a region has to raise
            watched.end(repr(error))
            raise CopyStopped(0) from error  # no block has all of its regions
        return PASSED

    def copy_region(self, index: int, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """Load one region of blocks, whose ids are checked: by stretches, or under GIL contention in few calls."""
        columns, waits = self._columns[index], self._waits[LOAD]
        num_calls = 1 + np.count_nonzero(gaps(on_host))
        if waits.have_begun and num_calls > 2 and len(on_host) * columns.block_bytes < num_calls * SHORT_CALL_BYTES:
            with waits.timing(2):
                columns.scatter_twice(on_device, on_host)
            return
        with waits.timing(int(num_calls)):
            columns.scatter(on_device, on_host)

    def settle(self, direction: Direction) -> None:
        """Nothing to wait for: copy calls return when they are done."""

    def device_block(self, block_id: int) -> NDArray[np.uint8]:
        return np.concatenate([rows[block_id] for rows in self._rows])

    def write_device_block(self, block_id: int, block: NDArray[np.uint8]) -> None:
        offset = 0
        for rows in self._rows:
            rows[block_id] = block[offset : offset + rows.shape[1]]
            offset += rows.shape[1]

    def _memory(self, num_blocks: int) -> NDArray[np.uint8]:
        """Host memory outside of the addresses that the regions span, if possible.

        If one array may be a part of the other, numpy makes another copy first: correct, but a third as fast. With
        regions both on the heap and above it, there is no memory outside; then no array may span all regions.
        """
        held = [anonymous_memory(num_blocks, self.block_bytes)]
        while self._spans(held[-1]) and len(held) < MOST_TRIES:
            try:
                held.append(anonymous_memory(num_blocks, self.block_bytes))  # earlier ones keep their addresses taken
            except ConfigError:
                break
        return held[-1]

    def _spans(self, memory: NDArray[np.uint8]) -> bool:
        lowest, highest = (choose(region.address for region in self.regions) for choose in (min, max))
        return lowest < memory.ctypes.data < highest

"""Copies between GPU tensors and pinned host memory, with plain torch streams and events."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.plan import Direction, TransferPlan
from ...errors import ConfigError
from ..fence import Fence
from ..region import KVRegion, byte_rows
from .base import RegionBackend, device_ids, host_ids, host_size
from .rows import stretches

__all__ = ["CudaBackend"]


class CudaBackend(RegionBackend):
    """One stream of the lowest priority per direction; each copy waits, on the device, for the fences it was given.

    The compute is taken to run on `compute_stream`, by default on the stream that is current where a fence is recorded.
    An engine whose forward runs on another stream than the one its event loop sees has to name it.

    Needs no `record_stream`: the tensors are held for as long as the backend lives, and a block is given to somebody
    else only after every copy of it has ended.
    """

    def __init__(self, regions: tuple[KVRegion, ...], compute_stream: torch.cuda.Stream | None = None) -> None:
        super().__init__(regions)
        self.device = regions[0].device
        self._compute_stream = compute_stream
        self._rows = [byte_rows(region) for region in regions]
        self._streams: dict[Direction, torch.cuda.Stream] = {}
        self._host = torch.empty((0, self.block_bytes), dtype=torch.uint8)

    def open(self, num_host_blocks: int) -> None:
        self._host = _pinned_memory(num_host_blocks, self.block_bytes)
        for direction in Direction:
            # Zero is the lowest priority that CUDA has.
            self._streams[direction] = torch.cuda.Stream(self.device, priority=0)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._host = torch.empty((0, self.block_bytes), dtype=torch.uint8)

    def record_fence(self) -> Fence:
        stream = self._compute_stream or torch.cuda.current_stream(self.device)
        return _record(stream)

    def thread_scope(self, direction: Direction) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)

    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None:
        for fence in fences:
            if isinstance(fence, torch.cuda.Event):
                self._streams[direction].wait_event(fence)
            else:
                fence.synchronize()

    def copy(self, plan: TransferPlan) -> Fence:
        stream = self._streams[plan.direction]
        with torch.cuda.stream(stream):
            for on_device, on_host in self._parts(plan):
                # Contiguous on both sides, or torch would copy by way of a temporary of its own and wait for it.
                if plan.direction is Direction.LOAD:
                    on_device.copy_(on_host, non_blocking=True)
                else:
                    on_host.copy_(on_device, non_blocking=True)
            return _record(stream)

    def settle(self, direction: Direction) -> None:
        self._streams[direction].synchronize()

    def device_block(self, block_id: int) -> NDArray[np.uint8]:
        with torch.cuda.stream(self._streams[Direction.LOAD]):
            block: NDArray[np.uint8] = torch.cat([rows[block_id] for rows in self._rows]).cpu().numpy()
        return block

    def write_device_block(self, block_id: int, block: NDArray[np.uint8]) -> None:
        offset = 0
        with torch.cuda.stream(self._streams[Direction.LOAD]):
            for rows in self._rows:
                rows[block_id].copy_(torch.from_numpy(block[offset : offset + rows.shape[1]]))
                offset += rows.shape[1]

    def _parts(self, plan: TransferPlan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What to copy, as pairs of device and host tensors that are both contiguous."""
        on_device, on_host = device_ids(plan), host_ids(plan)
        if len(self._rows) == 1 and self._rows[0].is_contiguous():
            # Neighbours on both sides keep the distance between their ids.
            yield from self._dense_parts(on_device, on_host)
            return
        for block_id, host_id in zip(on_device.tolist(), on_host.tolist(), strict=True):
            offset = 0
            for rows in self._rows:
                end = offset + rows.shape[1]
                yield rows[block_id], self._host[host_id, offset:end]
                offset = end

    def _dense_parts(
        self, on_device: NDArray[np.int64], on_host: NDArray[np.int64]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in stretches(on_device):
            for inner in stretches(on_host[part]):
                first, host_id = int(on_device[part][inner.start]), int(on_host[part][inner.start])
                num_blocks = inner.stop - inner.start
                yield self._rows[0][first : first + num_blocks], self._host[host_id : host_id + num_blocks]


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind everything `stream` was given, whose `synchronize` sleeps instead of spinning.

    A new one each time: recorded again, an event would over- or under-wait for whoever held it before.
    """
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _pinned_memory(num_blocks: int, block_bytes: int) -> torch.Tensor:
    """Host memory that the device copies from and to on its own. Pageable memory is correct, too, only slower."""
    size = host_size(num_blocks, block_bytes)
    try:
        return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        problem = f"{size / 2**30:.1f} GiB of host memory could not be pinned, copies will be slow: {error}"
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    try:
        return torch.empty((num_blocks, block_bytes), dtype=torch.uint8)
    except RuntimeError as error:
        raise ConfigError("num_host_blocks", f"{size / 2**30:.1f} GiB of host memory cannot be had ({error})") from None

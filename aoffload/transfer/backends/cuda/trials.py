"""Measures the break-even between copy engine and kernel with a backend that was just opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from ....core.hops import Direction
from ...fence import Fence
from .driver import Pieces
from .method import BreakEven, measure_break_even
from .page_locked import HostMemory

__all__ = ["Tried", "measured_on"]

BATCH_BYTES = 16 * 2**20
"""Bytes per trial: enough to hide the cost of a launch, few enough to repeat it a hundred times."""
MIN_BYTES = 2**20
"""A smaller host pool is not measured: the result would say nothing about the machine."""


class Tried(Protocol):
    """The part of a backend that the trials use."""

    @property
    def host(self) -> HostMemory: ...
    @property
    def device(self) -> torch.device: ...
    def copy_by_engine(self, pieces: Pieces, direction: Direction) -> None: ...
    def copy_by_kernel(self, pieces: Pieces, direction: Direction) -> None: ...
    def record_fence(self) -> Fence: ...
    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None: ...
    def settle(self, direction: Direction) -> None: ...


def measured_on(backend: Tried) -> BreakEven:
    """Measure with temporary device memory, and with the host pool, which is still empty."""
    num_bytes = min(BATCH_BYTES, backend.host.pieces[0].num_bytes if backend.host.pieces else 0)
    if num_bytes < MIN_BYTES:
        return BreakEven(0, 0)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=backend.device)
    for direction in Direction:  # earlier work on torch's stream may still use the new memory
        backend.wait_for(direction, (backend.record_fence(),))

    def settled(copy: Callable[[Pieces, Direction], None]) -> Callable[[Direction, Pieces], None]:
        def trial(direction: Direction, pieces: Pieces) -> None:
            copy(pieces, direction)
            backend.settle(direction)

        return trial

    def pieces_of(direction: Direction, size: int) -> Pieces:
        return scattered(direction, memory.data_ptr(), backend.host.address, num_bytes, size)

    try:
        return measure_break_even(settled(backend.copy_by_engine), settled(backend.copy_by_kernel), pieces_of)
    except Exception:  # noqa: BLE001 - a kernel that cannot be built here is not used
        backend.settle(Direction.LOAD)
        backend.settle(Direction.STORE)
        return BreakEven(0, 0)


def scattered(direction: Direction, on_device: int, on_host: int, num_bytes: int, size: int) -> Pieces:
    """Pieces of `size` bytes that are consecutive on the host and in random order on the device."""
    num_pieces = num_bytes // size
    starts = np.arange(num_pieces, dtype=np.uint64) * np.uint64(size)
    device = np.random.default_rng(0).permutation(starts) + np.uint64(on_device)
    host = starts + np.uint64(on_host)
    sizes = np.full(num_pieces, size, dtype=np.uint64)
    return Pieces(host, device, sizes) if direction is Direction.LOAD else Pieces(device, host, sizes)

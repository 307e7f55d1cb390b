"""A kernel that copies many small pieces at once, for which the copy engine has too much overhead."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ...fences import PASSED, Fence
from .driver import MAX_BATCH, Pieces

NUM_PROGRAMS = 16
"""Maximum multiprocessors that copy; the others are left for compute. Each has a tile under way: a link of 60 GB/s
moves 128 KiB in its latency of 2 us."""
TILE_BYTES = 8 * 1024
NUM_TABLES = 4


class CopyKernel(Protocol):
    """The kernel of one direction: one thread calls it at a time."""

    def copy(self, pieces: Pieces, alignment: int, record: Callable[[], Fence]) -> None:
        """Start copying on torch's current stream. The arrays may be reused after the call.

        `alignment` divides every address and size, and is the same in all calls for the blocks of a backend. `record()`
        returns a fence after everything that was started so far.
        """
        ...


@attrs.define(eq=False)
class Table:
    """`int64 [MAX_BATCH, 3]` of sources, destinations and bytes, in page-locked memory and on the device."""

    rows: torch.Tensor
    on_device: torch.Tensor
    fence: Fence = PASSED
    """No kernel reads the table after this fence."""

    @classmethod
    def on(cls, device: torch.device) -> Table:
        rows = torch.empty((MAX_BATCH, 3), dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(rows, rows if device.type == "cpu" else torch.empty_like(rows, device=device))

    def fill(self, pieces: Pieces) -> torch.Tensor:
        """Wait until the table is free, and write `pieces` to it. Returns the part that holds them, on the device."""
        self.fence.synchronize()
        num_pieces = len(pieces)
        rows: NDArray[np.int64] = self.rows.numpy()[:num_pieces]
        for column, numbers in enumerate((pieces.sources, pieces.destinations, pieces.sizes)):
            rows[:, column] = numbers.view(np.int64)
        if self.on_device is not self.rows:
            self.on_device[:num_pieces].copy_(self.rows[:num_pieces], non_blocking=True)
        return self.on_device[:num_pieces]


class TritonKernel:
    """Reads and writes page-locked host memory directly, over the link. The device gets the addresses as a table.

    Tables are used in turn, so that nothing is allocated for a copy. The first copy compiles the kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = importlib.import_module(f"{__package__}.triton_copy")
        self._tables = deque(Table.on(device) for _ in range(NUM_TABLES))

    def copy(self, pieces: Pieces, alignment: int, record: Callable[[], Fence]) -> None:
        for start in range(0, len(pieces), MAX_BATCH):
            part = pieces.where(slice(start, start + MAX_BATCH))
            table = self._tables[0]
            self._tables.rotate(-1)
            grid = (min(NUM_PROGRAMS, len(part)),)
            self._module.launch(grid, table.fill(part), len(part), alignment, TILE_BYTES)
            table.fence = record()


def triton_kernel(device: torch.device) -> TritonKernel | None:
    """The kernel if Triton is installed, as it is with torch's builds for CUDA; otherwise None."""
    try:
        return TritonKernel(device)
    except ImportError:
        return None

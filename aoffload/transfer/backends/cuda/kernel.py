"""A kernel that copies many small pieces at once, where the copy engine pays more for each than it moves."""

from __future__ import annotations

import importlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .driver import Pieces

__all__ = ["CopyKernel", "TritonKernel", "triton_kernel"]

NUM_PROGRAMS = 32
"""How many multiprocessors copy at most: enough to fill a link, few enough to leave the others to the compute."""
TILE_BYTES = 8 * 1024


class CopyKernel(Protocol):
    def copy(self, pieces: Pieces) -> None:
        """Start copying on the stream that is current for torch. The arrays may be used again after the call."""
        ...


class TritonKernel:
    """Reads and writes pinned host memory where it is, over the link; the addresses go to the device as a table."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Compiled by whoever copies first, so nobody pays for it who has no small pieces.
        self._module = importlib.import_module(f"{__package__}.triton_copy")

    def copy(self, pieces: Pieces) -> None:
        if len(pieces):
            alignment = common_alignment(pieces)
            grid = (min(NUM_PROGRAMS, len(pieces)),)
            self._module.launch(grid, self._table(pieces), len(pieces), alignment, TILE_BYTES)

    def _table(self, pieces: Pieces) -> torch.Tensor:
        """`int64 [num_pieces, 3]` on the device. Both copies of it are torch's: it gives neither of them to somebody
        else before the stream is through with it."""
        table = torch.from_numpy(_rows(pieces))
        return table if self._device.type == "cpu" else table.pin_memory().to(self._device, non_blocking=True)


def triton_kernel(device: torch.device) -> TritonKernel | None:
    """The kernel, where Triton is installed, as it is beside torch's builds for CUDA."""
    try:
        return TritonKernel(device)
    except ImportError:
        return None


def common_alignment(pieces: Pieces) -> int:
    """The largest power of two up to 16 that divides every address and every size."""
    bits = np.bitwise_or.reduce(np.concatenate([pieces.sources, pieces.destinations, pieces.sizes]))
    return int(min(16, int(bits) & -int(bits))) or 16


def _rows(pieces: Pieces) -> NDArray[np.int64]:
    return np.stack([pieces.sources, pieces.destinations, pieces.sizes], axis=1).view(np.int64)

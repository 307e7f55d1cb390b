"""A kernel that copies many small pieces at once, for which the copy engine has too much overhead."""

from __future__ import annotations

import importlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .driver import Pieces

__all__ = ["CopyKernel", "TritonKernel", "triton_kernel"]

NUM_PROGRAMS = 32
"""Maximum multiprocessors that copy: enough to fill the link, few enough to leave the others to compute."""
TILE_BYTES = 8 * 1024


class CopyKernel(Protocol):
    def copy(self, pieces: Pieces) -> None:
        """Start copying on torch's current stream. The arrays may be reused after the call."""
        ...


class TritonKernel:
    """Reads and writes page-locked host memory directly, over the link. The device gets the addresses as a table."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Compiled by the first copy, so programs without small pieces do not pay for it.
        self._module = importlib.import_module(f"{__package__}.triton_copy")

    def copy(self, pieces: Pieces) -> None:
        if len(pieces):
            alignment = common_alignment(pieces)
            grid = (min(NUM_PROGRAMS, len(pieces)),)
            self._module.launch(grid, self._table(pieces), len(pieces), alignment, TILE_BYTES)

    def _table(self, pieces: Pieces) -> torch.Tensor:
        """The pieces as `int64 [num_pieces, 3]` on the device. Torch allocates the table on both sides, and reuses
        neither memory before the stream has finished with it."""
        table = torch.from_numpy(_rows(pieces))
        return table if self._device.type == "cpu" else table.pin_memory().to(self._device, non_blocking=True)


def triton_kernel(device: torch.device) -> TritonKernel | None:
    """The kernel if Triton is installed, as it is with torch's builds for CUDA; otherwise None."""
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

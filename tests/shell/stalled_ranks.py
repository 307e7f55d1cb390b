"""Builders for rank processes: shared tensors, and a copy that stops half-way."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray

from aoffload._kernel.states import Direction
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.local import LocalTransport
from aoffload._transfer.region import KVRegion

HELD_RANK = 1


class HeldBackend(CpuBackend):
    """Copies block by block; the first load stops between two blocks, says so, and waits for a word."""

    def __init__(self, regions: tuple[KVRegion, ...], gate: Connection) -> None:
        super().__init__(regions)
        self._blocks_per_batch = 1
        self._gate = gate
        self._num_loaded = 0

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        if direction is Direction.LOAD:
            self._num_loaded += 1
            if self._num_loaded == 2:
                self._gate.send_bytes(b"half-way")
                self._gate.recv_bytes()
        super().copy_batch(direction, on_device, on_host)


def build(tensors: Sequence[Sequence[torch.Tensor]], gate: Connection, rank: int, num_ranks: int) -> LocalTransport:
    """Rank `rank` of `num_ranks` over `tensors[rank]`, which the test sees, too."""
    if rank != HELD_RANK:
        return LocalTransport(tensors[rank])
    return LocalTransport(tensors[rank], lambda regions: HeldBackend(regions, gate))

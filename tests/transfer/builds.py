"""What rank processes build. They import this module, so everything here is a function that can be named."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aoffload._kernel.states import Direction
from aoffload._transfer.backends.base import LostDevice
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.fences import Fence
from aoffload._transfer.local import LocalTransport
from aoffload._transfer.ranks import serving
from aoffload._transfer.ranks.wire import Open
from aoffload._transfer.region import KVRegion


def plain(rank: int, num_ranks: int) -> torch.Tensor:
    """Eight blocks, which nobody else sees."""
    return torch.zeros(8, 6, dtype=torch.int32)


def shared(pools: list[torch.Tensor], rank: int, num_ranks: int) -> torch.Tensor:
    """Memory that the test sees, too."""
    return pools[rank]


def failing(rank: int, num_ranks: int) -> torch.Tensor:
    if rank == 1:
        raise RuntimeError("no such device")
    return plain(rank, num_ranks)


def ending(rank: int, num_ranks: int) -> torch.Tensor:
    os._exit(3)


def exiting(rank: int, num_ranks: int) -> torch.Tensor:
    """Ends as a process does whose main module starts ranks when it is imported."""
    os._exit(1)


def waiting(gate: Connection, rank: int, num_ranks: int) -> torch.Tensor:
    gate.recv_bytes()
    return plain(rank, num_ranks)


def speaking(rank: int, num_ranks: int) -> torch.Tensor:
    """A rank that answers with a command."""
    serving.Opened = lambda: Open(1, True)  # type: ignore[assignment,misc]
    return plain(rank, num_ranks)


def present(path: str, rank: int, num_ranks: int) -> torch.Tensor:
    """Holds a named pipe open for as long as the process lives, and has a thread that never ends."""
    os.open(path, os.O_WRONLY)
    threading.Thread(target=threading.Event().wait).start()
    return plain(rank, num_ranks)


class HeldBackend(CpuBackend):
    """Copies block by block; a load of rank 1 stops after its first block, says so, and waits for a word."""

    gate: Connection

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self._blocks_per_batch = 1
        self.num_copied = 0

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        if direction is Direction.LOAD and self.num_copied == 1:
            self.gate.send_bytes(b"half-way")
            self.gate.recv_bytes()
        super().copy_batch(direction, on_device, on_host)
        self.num_copied += direction is Direction.LOAD


def held(pools: list[Any], gate: Connection, rank: int, num_ranks: int) -> Any:
    """Shared memory; loads of rank 1 are held."""
    if rank != 1:
        return pools[rank]

    def backend(regions: tuple[KVRegion, ...]) -> HeldBackend:
        made = HeldBackend(regions)
        made.gate = gate
        return made

    return LocalTransport(pools[rank], backend)


class Lost(LostDevice):
    """What a device of some make raises."""


class MortalBackend(CpuBackend):
    """Its device is lost under the first load: that copy is in doubt, and every other call fails."""

    is_lost = False

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        self.is_lost = self.is_lost or direction is Direction.LOAD
        self._check()
        super().copy_batch(direction, on_device, on_host)

    def settle(self, direction: Direction) -> None:
        self._check()

    def record_fence(self) -> Fence:
        self._check()
        return super().record_fence()

    def _check(self) -> None:
        if self.is_lost:
            raise Lost("planted")


def mortal(rank: int, num_ranks: int) -> Any:
    """The last rank loses its device."""
    pool = plain(rank, num_ranks)
    return LocalTransport(pool, MortalBackend) if rank == num_ranks - 1 else pool

"""What the benchmarks on a CUDA device share: blocks in pieces on it, and one large copy beside them."""

from __future__ import annotations

import itertools
import sys
from array import array
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch

from aoffload import Tier
from aoffload.cuda import CudaBackend, CudaOptions
from aoffload.env import Env
from aoffload.ledger import Completion, Direction, Outcome, TransferPlan
from aoffload.transfer.backends.cuda import Pieces
from aoffload.transport import LocalTransport

from .harness import Measured, Row

__all__ = ["BLOCK_BYTES", "NUM_BLOCKS_MOVED", "SECONDS", "Copying", "cuda_device", "rate_row", "share_row"]

BLOCK_BYTES = 2 * 2**20
NUM_BLOCKS_MOVED = 128
BLOCKS_PER_JOB = 16
SECONDS = 3.0
WAYS = {Direction.STORE: (Tier.DEVICE, Tier.HOST), Direction.LOAD: (Tier.HOST, Tier.DEVICE)}


def cuda_device(benchmark: str) -> torch.device | None:
    """The CUDA device; None, and a message, if torch sees none."""
    if not torch.cuda.is_available():
        print(f"{benchmark}: not run, since torch sees no CUDA device", file=sys.stderr)
        return None
    print(f"{benchmark}: {torch.cuda.get_device_name()}", file=sys.stderr)
    return torch.device("cuda")


class Copying:
    """A transport whose blocks lie in pieces of `piece_bytes`, no two neighbours on the device, and one large copy."""

    def __init__(
        self, device: torch.device, options: CudaOptions, piece_bytes: int, num_moved: int = NUM_BLOCKS_MOVED
    ) -> None:
        self.num_moved = num_moved
        num_blocks = 2 * num_moved + 1
        # One allocation, because a driver that uses torch alone reaches only the memory of the regions.
        sizes = [num_blocks * BLOCK_BYTES, num_moved * BLOCK_BYTES, num_moved * BLOCK_BYTES]
        layers, *large = torch.split(torch.empty(sum(sizes), dtype=torch.uint8, device=device), sizes)
        layers = layers.view(BLOCK_BYTES // piece_bytes, num_blocks, piece_bytes)
        self.large = dict(zip(Direction, large, strict=True))
        # Fences on an idle stream, so that copying is measured, not waiting for compute.
        idle = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.transport = LocalTransport(list(layers), partial(CudaBackend, compute_stream=idle, options=options))
        self.completions: SimpleQueue[Completion] = SimpleQueue()
        # Both ways at once need blocks of their own.
        self.transport.open(2 * num_moved, verify=False, deliver=self.completions.put, env=Env())
        order = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
        self._on_device = {Direction.STORE: order[:num_moved], Direction.LOAD: order[num_moved:]}
        self._first_host = {Direction.STORE: 0, Direction.LOAD: num_moved}
        self._job_ids = itertools.count(1)

    @property
    def backend(self) -> CudaBackend:
        assert isinstance(self.transport.backend, CudaBackend)
        return self.transport.backend

    @property
    def gigabytes(self) -> float:
        return self.num_moved * BLOCK_BYTES / 1e9

    def move(self, *directions: Direction) -> None:
        """Move all blocks, in all `directions` at once."""
        for _ in range(sum(self.launch(direction) for direction in directions)):
            completion = self.completions.get(timeout=60)
            assert completion.outcome is Outcome.LANDED, completion

    def launch(self, direction: Direction) -> int:
        """Launch the jobs for all blocks; returns their number."""
        starts = range(0, self.num_moved, BLOCKS_PER_JOB)
        for start in starts:
            ids = self._on_device[direction][start : start + BLOCKS_PER_JOB]
            on_device = array("i", ids.tolist())
            first = self._first_host[direction] + start
            on_host = array("i", range(first, first + len(ids)))
            given = (on_device, on_host) if direction is Direction.STORE else (on_host, on_device)
            self.transport.launch(TransferPlan(next(self._job_ids), *WAYS[direction], *given), None)
        return len(starts)

    def move_large(self, *directions: Direction) -> None:
        """Copy as many bytes in one piece each way: the rate that the link can reach."""
        with self.backend.driver.bound():
            for direction in directions:
                self.backend.copy_by_engine(self._one_piece(direction), direction)
            for direction in directions:
                self.backend.settle(direction)

    def copy_by_engine(self, pieces: Pieces, direction: Direction) -> None:
        """Copy `pieces`, and wait until they are there."""
        with self.backend.driver.bound():
            self.backend.copy_by_engine(pieces, direction)
            self.backend.settle(direction)

    def copy_by_kernel(self, pieces: Pieces, direction: Direction) -> None:
        with self.backend.driver.bound():
            self.backend.copy_by_kernel(pieces, direction)
            self.backend.settle(direction)

    def _one_piece(self, direction: Direction) -> Pieces:
        host = self.backend.host.address + self._first_host[direction] * BLOCK_BYTES
        device = self.large[direction].data_ptr()
        ends = (device, host) if direction is Direction.STORE else (host, device)
        size = self.large[direction].numel()
        return Pieces(*(np.array([number], dtype=np.uint64) for number in (*ends, size)))

    def close(self) -> None:
        assert self.transport.close(timeout_s=10)


def rate_row(name: str, gigabytes: float, ours: Measured, limit: Measured, wanted: float) -> Row:
    return Row(
        name=name, value=gigabytes / ours.median_s, unit="GB/s",
        spread=f"{gigabytes / ours.high_s:.3g}-{gigabytes / ours.low_s:.3g}",
        against="one large copy", limit=gigabytes / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip


def share_row(
    name: str, amount: float, unit: str, found: dict[str, Measured], alone: str, beside: str, wanted: float
) -> Row:
    ours, limit = found[beside], found[alone]
    return Row(
        name=name, value=amount / ours.median_s, unit=unit,
        spread=f"{amount / ours.high_s:.3g}-{amount / ours.low_s:.3g}",
        against=alone, limit=amount / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip

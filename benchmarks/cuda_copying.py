"""Shared code of the benchmarks on a CUDA device: blocks in pieces on the device, and one large copy beside them."""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from aoffload import Tier
from aoffload._transfer.backends.cuda.driver import Pieces
from aoffload._transfer.backends.cuda.trials import scattered
from aoffload.cuda import BreakEven, CudaBackend, CudaOptions
from aoffload.ledger import Completion, Direction, Outcome, TransferPlan
from aoffload.transport import Env, Fence, LocalTransport

from .harness import Measured, Row
from .sizes import sized

__all__ = [
    "BLOCK_BYTES", "ENGINE", "KERNEL", "KIB", "MIB", "NUM_BLOCKS_MOVED", "SECONDS", "Copying", "cuda_device",
    "expected_row", "rate_row", "share_row",
]  # fmt: skip

KIB, MIB = 2**10, 2**20
BLOCK_BYTES = 2 * MIB
NUM_BLOCKS_MOVED = sized(128, 2)
BLOCKS_PER_JOB = 16
SECONDS = sized(3.0, 0.0)
ENGINE = CudaOptions(break_even=BreakEven(0, 0))
"""The copy engine copies everything, so the break-even is not measured at opening."""
KERNEL = CudaOptions(break_even=BreakEven(2**40, 2**40))
"""The kernel copies everything, if there is one."""
WAYS = {Direction.STORE: (Tier.DEVICE, Tier.HOST), Direction.LOAD: (Tier.HOST, Tier.DEVICE)}


def cuda_device(benchmark: str) -> torch.device | None:
    """The CUDA device. None, and a message, if torch finds none."""
    if not torch.cuda.is_available():
        print(f"{benchmark}: not run, since torch sees no CUDA device", file=sys.stderr)
        return None
    print(f"{benchmark}: {torch.cuda.get_device_name()}", file=sys.stderr)
    return torch.device("cuda")


class Copying:
    """A transport whose blocks are in pieces of `piece_bytes`, no two neighbours on the device, and one large copy.

    It is closed by `close`, or at the end of a `with` block.
    """

    def __init__(
        self,
        device: torch.device,
        options: CudaOptions,
        piece_bytes: int,
        num_moved: int = NUM_BLOCKS_MOVED,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.num_moved, self.block_bytes = num_moved, block_bytes
        num_blocks = 2 * num_moved + 1
        # One allocation, because a driver that uses torch alone can only access the memory of the regions.
        sizes = [num_blocks * block_bytes, num_moved * block_bytes, num_moved * block_bytes]
        layers, *large = torch.split(torch.empty(sum(sizes), dtype=torch.uint8, device=device), sizes)
        layers = layers.view(block_bytes // piece_bytes, num_blocks, piece_bytes)
        self.large = dict(zip(Direction, large, strict=True))
        # Fences on an idle stream, so that copying is measured, not waiting for compute.
        idle = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.transport = LocalTransport(list(layers), partial(CudaBackend, compute_stream=idle, options=options))
        self.completions: SimpleQueue[Completion] = SimpleQueue()
        self.hear: Callable[[Completion], object] = self.completions.put
        """Called with each completion, in a copy thread. `move` needs the default."""
        # Both ways at once need blocks of their own.
        self.transport.open(2 * num_moved, verify=False, deliver=self._deliver, env=Env())
        order = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
        self._on_device = {Direction.STORE: order[:num_moved], Direction.LOAD: order[num_moved:]}
        self._first_host = {Direction.STORE: 0, Direction.LOAD: num_moved}
        self._job_ids = itertools.count(1)

    def _deliver(self, completion: Completion) -> None:
        self.hear(completion)

    @property
    def backend(self) -> CudaBackend:
        assert isinstance(self.transport.backend, CudaBackend)
        return self.transport.backend

    @property
    def gigabytes(self) -> float:
        return self.num_moved * self.block_bytes / 1e9

    def move(self, *directions: Direction) -> None:
        """Move all blocks, in all `directions` at once."""
        for _ in range(sum(self.launch(direction) for direction in directions)):
            completion = self.completions.get(timeout=60)
            assert completion.outcome is Outcome.LANDED, completion

    def launch(self, direction: Direction) -> int:
        """Launch the jobs for all blocks. Returns their number."""
        starts = range(0, self.num_moved, BLOCKS_PER_JOB)
        for start in starts:
            self.launch_job(direction, start, BLOCKS_PER_JOB)
        return len(starts)

    def launch_job(self, direction: Direction, start: int, num_blocks: int, after: Fence | None = None) -> int:
        """Launch one job for `num_blocks` blocks from `start` on, or for all that remain. Returns its id."""
        ids = self._on_device[direction][start : start + num_blocks]
        on_device = array("i", ids.tolist())
        first = self._first_host[direction] + start
        on_host = array("i", range(first, first + len(ids)))
        given = (on_device, on_host) if direction is Direction.STORE else (on_host, on_device)
        plan = TransferPlan(next(self._job_ids), *WAYS[direction], *given)
        self.transport.launch(plan, after)
        return plan.job_id

    def scattered(self, direction: Direction, size: int) -> Pieces:
        """The bytes of all blocks in pieces of `size`, consecutive on the host and in random order on the device."""
        num_bytes = self.large[direction].numel() // size * size
        host = self.backend.host.address + self._first_host[direction] * self.block_bytes
        return scattered(direction, self.large[direction].data_ptr(), host, num_bytes, size)

    def move_large(self, *directions: Direction) -> None:
        """Copy the same number of bytes in one piece in each direction. This is the rate that the link can reach."""
        with self.backend.driver.bound():
            for direction in directions:
                self.backend.copy_by_engine(self._one_piece(direction), direction)
            for direction in directions:
                self.backend.settle(direction)

    def copy_by_engine(self, pieces: Pieces, direction: Direction) -> None:
        """Copy `pieces`, and wait until they have arrived."""
        with self.backend.driver.bound():
            self.backend.copy_by_engine(pieces, direction)
            self.backend.settle(direction)

    def why_no_kernel(self) -> str:
        """Why the kernel copies nothing here, after a try. Empty if it does. Triton may be installed and not
        compile."""
        if not self.backend.has_kernel:
            return f"no kernel copies here: {self.backend!r}"
        try:
            self.copy_by_kernel(self.scattered(Direction.LOAD, 4 * KIB), Direction.LOAD)
        except Exception as error:  # noqa: BLE001 - whatever a compiler may raise
            return f"the kernel cannot be used: {error!r}"
        return ""

    def copy_by_kernel(self, pieces: Pieces, direction: Direction) -> None:
        with self.backend.driver.bound():
            self.backend.copy_by_kernel(pieces, direction)
            self.backend.settle(direction)

    def host_bytes(self, direction: Direction) -> NDArray[np.uint8]:
        """The host's side of all blocks of a direction, as one array."""
        first = self._first_host[direction]
        return self.backend.host.rows[first : first + self.num_moved].reshape(-1)

    def _one_piece(self, direction: Direction) -> Pieces:
        host = self.backend.host.address + self._first_host[direction] * self.block_bytes
        device = self.large[direction].data_ptr()
        ends = (device, host) if direction is Direction.STORE else (host, device)
        size = self.large[direction].numel()
        return Pieces(*(np.array([number], dtype=np.uint64) for number in (*ends, size)))

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        assert self.transport.close(timeout_s=10)


def rate_row(name: str, gigabytes: float, ours: Measured, limit: Measured, wanted: float | None = None) -> Row:
    return Row(
        name=name, value=gigabytes / ours.median_s, unit="GB/s",
        spread=f"{gigabytes / ours.high_s:.3g}-{gigabytes / ours.low_s:.3g}",
        against="one large copy", limit=gigabytes / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip


def share_row(
    name: str, amount: float, unit: str, found: dict[str, Measured], alone: str, beside: str, wanted: float | None
) -> Row:
    ours, limit = found[beside], found[alone]
    return Row(
        name=name, value=amount / ours.median_s, unit=unit,
        spread=f"{amount / ours.high_s:.3g}-{amount / ours.low_s:.3g}",
        against=alone, limit=amount / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip


def expected_row(name: str, value: float, unit: str, expected: float, spread: str = "") -> Row:
    """A figure without a comparison in the same run. It is compared with the expected value of an H100 on PCIe 5.0
    x16."""
    return Row(
        name=name, value=value, unit=unit, spread=spread, against="expected of an H100", limit=expected,
        ratio=value / expected,
    )  # fmt: skip

"""Batches of thousands of pieces, repeated. Run it last, and in a process of its own, because some drivers crash or
hang (580.159: vllm-project/vllm#49276). It raises if bytes are wrong. The last line of its output shows its
progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import attrs
import numpy as np
import torch

from aoffload.cuda import CudaOptions
from aoffload.ledger import Direction, Outcome

from .cuda_copying import BLOCK_BYTES, ENGINE, KIB, Copying, cuda_device, expected_row
from .harness import Row
from .peer import Peer
from .sizes import sized

__all__ = ["run", "stress_rows"]

PIECES_PER_BATCH = 4096
PIECE_BYTES = 4 * KIB
NUM_BATCHES = (10, 100, 1000)
FEWER = sized(1, 100)
"""Divisor of the numbers in a dry run."""
OUTSTANDING = 4
UNBOUNDED = attrs.evolve(ENGINE, max_batches=1024)
"""More batches than are ever submitted here."""
EXPECTED_US = 2 * PIECES_PER_BATCH * 0.6
"""Time for a batch in each direction, if copying takes as long as submitting."""
NUM_HELD = sized(512, 4)
"""Number of blocks of 2 MiB in pieces of 16 KiB that wait for a fence."""
HELD_S = sized(0.15, 0.01)
SLEEP_CYCLES = 400_000_000
"""About 0.2 s of a device."""


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_stress")) is not None:
        yield held_row(device)
        yield from stress_rows(device)


def held_row(device: torch.device) -> Row:
    """Launches of compute while thousands of pieces wait for a fence, because a driver may delay them, too."""
    counters, other, held = torch.zeros(1024, device=device), torch.cuda.Stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    with Copying(device, UNBOUNDED, 16 * KIB, num_moved=NUM_HELD) as copying:
        alone = _launches(counters)
        with torch.cuda.stream(other):
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            held.record()
        share = max(1, copying.num_moved // OUTSTANDING)
        jobs = [copying.launch_job(Direction.STORE, at, share, held) for at in range(0, copying.num_moved, share)]
        beside = _launches(counters)
        torch.cuda.synchronize()
        for _ in jobs:
            assert copying.completions.get(timeout=60).outcome is Outcome.LANDED
    ours, limit = (float(np.percentile(took, 99)) * 1e6 for took in (beside, alone))
    return Row(
        name="a launch beside held copies, p99", value=ours, unit="us", spread=f"longest {max(beside) * 1e6:.0f}",
        against="alone", limit=limit, ratio=ours / limit,
    )  # fmt: skip


def _launches(counters: torch.Tensor) -> list[float]:
    took_s, end_s = list[float](), time.perf_counter() + HELD_S
    while not took_s or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        counters.add_(1)
        took_s.append(time.perf_counter() - began_s)
    return took_s


def stress_rows(
    device: torch.device, options: CudaOptions = ENGINE, numbers: tuple[int, ...] = NUM_BATCHES
) -> Iterator[Row]:
    """Microseconds for a batch in each direction: first with a few in progress, then with all of them."""
    num_moved = PIECES_PER_BATCH * PIECE_BYTES // BLOCK_BYTES
    for about, most in ((f"{OUTSTANDING} outstanding", OUTSTANDING), ("none awaited", UNBOUNDED.max_batches)):
        bounded = attrs.evolve(options, max_batches=most)
        with Copying(device, bounded, 64 * KIB, num_moved=num_moved) as copying:
            batches = Batches(copying)
            for number in numbers:
                print(f"cuda_stress: {number} batches, {about} ...", file=sys.stderr, flush=True)
                actual = max(1, number // FEWER)
                each_us = batches.copy(actual) / actual * 1e6
                yield expected_row(f"{number:,} batches of 4,096 pieces, {about}", each_us, "us", EXPECTED_US)


class Batches:
    """A batch in each direction, of pieces that are consecutive on the host and in random order on the device."""

    def __init__(self, copying: Copying) -> None:
        self._copying = copying
        self._pieces = {direction: copying.scattered(direction, PIECE_BYTES) for direction in Direction}
        assert all(len(pieces) == PIECES_PER_BATCH for pieces in self._pieces.values())

    def copy(self, number: int) -> float:
        """Seconds for `number` batches in each direction, at most the backend's `max_batches` of them in progress.
        Raises if the bytes of the last ones are wrong."""
        backend = self._copying.backend
        self._fill(number % 251)
        began_s = time.perf_counter()
        with backend.driver.bound():
            for _ in range(number):
                for direction in Direction:
                    backend.copy_by_engine(self._pieces[direction], direction)
            for direction in Direction:
                backend.settle(direction)
        took_s = time.perf_counter() - began_s
        self._check()
        return took_s

    def _fill(self, salt: int) -> None:
        """Fill piece `i` of a source with bytes that differ from those of its neighbours, and from those of the last
        time."""
        for direction in Direction:
            host, device, _ = self._sides(direction)
            source, destination = (device, host) if direction is Direction.STORE else (host, device)
            source[:] = (torch.arange(PIECES_PER_BATCH, device=source.device) % 253 + salt).to(torch.uint8)[:, None]
            destination.zero_()
        torch.cuda.synchronize()

    def _check(self) -> None:
        for direction in Direction:
            host, device, order = self._sides(direction)
            assert torch.equal(device.cpu()[order], host), f"wrong bytes after a {direction.value}"

    def _sides(self, direction: Direction) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pieces on the host and on the device `[pieces, bytes]`, and the device's index of each of the host's."""
        copying, pieces = self._copying, self._pieces[direction]
        on_device = pieces.sources if direction is Direction.STORE else pieces.destinations
        order = (on_device - np.uint64(copying.large[direction].data_ptr())) // np.uint64(PIECE_BYTES)
        host, device = torch.from_numpy(copying.host_bytes(direction)), copying.large[direction]
        shape = (PIECES_PER_BATCH, PIECE_BYTES)
        return host.view(shape), device.view(shape), torch.from_numpy(order.astype(np.int64))

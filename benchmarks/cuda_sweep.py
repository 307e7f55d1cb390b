"""Pieces of every size, in each direction: in one batch for the copy engine, with a call for each piece, and by the
kernel. Also the time to submit a piece. The ways take turns, with one large copy of the same bytes among them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from aoffload._transfer.backends.cuda.driver import Pieces
from aoffload.cuda import CudaOptions
from aoffload.ledger import Direction

from .cuda_copying import ENGINE, KIB, Copying, cuda_device, expected_row, rate_row
from .harness import Row, Sample, Subject, interleave, timed
from .peer import Peer
from .sizes import sized

__all__ = ["run", "sweep_rows"]

SIZES_KIB = sized((64, 16, 4, 1024, 32, 256, 8, 128, 512, 2048), (64, 16, 4, 1024, 32))
"""The most important sizes first, because the sweep may be interrupted."""
NUM_MOVED = sized(32, 1)
SECONDS_PER_SIZE = sized(0.25, 0.0)
EXPECTED_SUBMIT_US = 0.6


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_sweep")) is not None:
        yield from sweep_rows(device)


def sweep_rows(
    device: torch.device, options: CudaOptions = ENGINE, num_moved: int = NUM_MOVED, seconds: float = SECONDS_PER_SIZE
) -> Iterator[Row]:
    with Copying(device, options, piece_bytes=64 * KIB, num_moved=num_moved) as copying:
        if problem := copying.why_no_kernel():
            print(f"cuda_sweep: no rows of the kernel, since {problem}", file=sys.stderr)
        for kib in SIZES_KIB:
            for direction in Direction:
                yield from _rows(copying, direction, kib, seconds, has_kernel=not problem)


def _rows(
    copying: Copying, direction: Direction, kib: int, seconds: float, *, has_kernel: bool
) -> Iterator[Row]:  # fmt: skip
    pieces, backend = copying.scattered(direction, kib * KIB), copying.backend

    def one_by_one() -> None:
        with backend.driver.bound():
            backend.driver.copy_each(pieces, backend._lanes[direction].stream)
            backend.settle(direction)

    def submitted() -> Sample:
        """The time of the call per piece, without the copy itself."""
        with backend.driver.bound():
            whole = timed(lambda: backend.copy_by_engine(pieces, direction))
            backend.settle(direction)
        return Sample(whole.wall_s / len(pieces), whole.cpu_s / len(pieces))

    def subject(copy: Callable[[Pieces, Direction], None]) -> Subject:
        return lambda: timed(lambda: copy(pieces, direction))

    subjects: dict[str, Subject] = {
        "one batch": subject(copying.copy_by_engine),
        "one by one": lambda: timed(one_by_one),
        "large": lambda: timed(lambda: copying.move_large(direction)),
        "submission": submitted,
    }
    if has_kernel:
        subjects["kernel"] = subject(copying.copy_by_kernel)
    found = interleave(subjects, seconds=seconds, least=3)
    about = f"{direction.value}, pieces of {kib} KiB"
    for name in ("one batch", "one by one", "kernel"):
        if name in found:
            yield rate_row(f"{about}, {name}", pieces.num_bytes / 1e9, found[name], found["large"])
    ours = found["submission"]
    yield expected_row(
        f"{about}, submission of a piece", ours.median_s * 1e6, "us", EXPECTED_SUBMIT_US, spread=ours.spread
    )

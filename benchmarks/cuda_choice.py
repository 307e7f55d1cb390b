"""Copy engine or kernel: the break-even that a backend finds, and its choice on both sides of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import attrs
import torch

from aoffload.cuda import CudaOptions
from aoffload.ledger import Direction
from aoffload.transfer.backends.cuda import Pieces
from aoffload.transfer.backends.cuda.method import PUBLISHED

from .cuda_copying import BLOCK_BYTES, NUM_BLOCKS_MOVED, SECONDS, Copying, cuda_device, rate_row
from .harness import Row, Subject, interleave, timed
from .peer import Peer

__all__ = ["choice_rows", "run"]


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows; without a CUDA device none, and a message."""
    if (device := cuda_device("cuda_choice")) is not None:
        yield from choice_rows(device, CudaOptions())


def choice_rows(device: torch.device, options: CudaOptions, seconds: float = SECONDS / 3) -> Iterator[Row]:
    """The break-even, and for a size on each side of it the chosen way beside the better one. No rows without a kernel,
    because there is no choice then."""
    with Copying(device, options, piece_bytes=64 * 1024, num_moved=min(16, NUM_BLOCKS_MOVED)) as copying:
        if problem := copying.why_no_kernel():
            print(f"cuda_choice: not run, since {problem}", file=sys.stderr)
            return
        for direction in Direction:
            yield from _rows(copying, direction, seconds)


def _rows(copying: Copying, direction: Direction, seconds: float) -> Iterator[Row]:
    at, published = copying.backend.break_even.of(direction), PUBLISHED.of(direction)
    below = max(1024, (at or published) // 2 // 1024 * 1024)
    above = min(BLOCK_BYTES // 2, max(1, (at or published) // 1024) * 2048)
    yield Row(
        name=f"{direction.value}, break-even", value=at / 1024, unit="KiB", against="as published",
        limit=published / 1024, ratio=at / published,
    )  # fmt: skip
    yield _choice_row(copying, direction, "half", below, seconds)
    yield _choice_row(copying, direction, "twice", above, seconds)


def _choice_row(copying: Copying, direction: Direction, share: str, size: int, seconds: float) -> Row:
    pieces = copying.scattered(direction, size)

    def subject(copy: Callable[[Pieces, Direction], None]) -> Subject:
        return lambda: timed(lambda: copy(pieces, direction))

    ways = {"engine": subject(copying.copy_by_engine), "kernel": subject(copying.copy_by_kernel)}
    found = interleave(ways, seconds=seconds)
    chosen = "kernel" if size < copying.backend.break_even.of(direction) else "engine"
    better = min(found, key=lambda name: found[name].median_s)
    name = f"{direction.value}, {share} the break-even, by what is chosen"
    row = rate_row(name, pieces.num_bytes / 1e9, found[chosen], found[better], 0.95)
    return attrs.evolve(row, against=f"{size // 1024} KiB, chosen: {chosen}, better: {better}")

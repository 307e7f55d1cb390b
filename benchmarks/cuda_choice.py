"""Copy engine or kernel: the size up to which the kernel is chosen for loads, and the speed of the choice on both sides
of it.

The kernel has to be `MARGIN` times faster to be chosen, because it takes multiprocessors from the forward. It is never
chosen for stores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import attrs
import torch

from aoffload._transfer.backends.cuda.driver import Pieces
from aoffload._transfer.backends.cuda.trials import MARGIN, PUBLISHED
from aoffload.cuda import CudaOptions
from aoffload.ledger import Direction

from .cuda_copying import BLOCK_BYTES, NUM_BLOCKS_MOVED, SECONDS, Copying, cuda_device, rate_row
from .harness import Row, Subject, interleave, timed
from .peer import Peer

__all__ = ["choice_rows", "run"]

SHARE = 0.95
"""The least speed of the chosen way, relative to the faster one. The engine may be slower than the kernel by the
margin."""


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_choice")) is not None:
        yield from choice_rows(device, CudaOptions())


def choice_rows(device: torch.device, options: CudaOptions, seconds: float = SECONDS / 3) -> Iterator[Row]:
    """The largest size of the kernel, and for a size on each side of it the chosen way beside the better one. No rows
    without a kernel, because there is no choice then."""
    with Copying(device, options, piece_bytes=64 * 1024, num_moved=min(16, NUM_BLOCKS_MOVED)) as copying:
        if problem := copying.why_no_kernel():
            print(f"cuda_choice: not run, since {problem}", file=sys.stderr)
            return
        yield from _rows(copying, seconds)


def _rows(copying: Copying, seconds: float) -> Iterator[Row]:
    at, published = copying.backend.break_even.load_bytes, PUBLISHED.load_bytes
    below = max(1024, (at or published) // 2 // 1024 * 1024)
    above = min(BLOCK_BYTES // 2, max(1, (at or published) // 1024) * 2048)
    yield Row(
        name="load, break-even", value=at / 1024, unit="KiB", against="as published",
        limit=published / 1024, ratio=at / published,
    )  # fmt: skip
    yield _choice_row(copying, "half", below, seconds)
    yield _choice_row(copying, "twice", above, seconds)


def _choice_row(copying: Copying, share: str, size: int, seconds: float) -> Row:
    direction = Direction.LOAD
    pieces = copying.scattered(direction, size)

    def subject(copy: Callable[[Pieces, Direction], None]) -> Subject:
        return lambda: timed(lambda: copy(pieces, direction))

    ways = {"engine": subject(copying.copy_by_engine), "kernel": subject(copying.copy_by_kernel)}
    found = interleave(ways, seconds=seconds)
    chosen, wanted = "engine", SHARE / MARGIN
    if size < copying.backend.break_even.load_bytes:
        chosen, wanted = "kernel", SHARE
    better = min(found, key=lambda name: found[name].median_s)
    name = f"load, {share} the break-even, by what is chosen"
    row = rate_row(name, pieces.num_bytes / 1e9, found[chosen], found[better], wanted)
    return attrs.evolve(row, against=f"{size // 1024} KiB, chosen: {chosen}, better: {better}")

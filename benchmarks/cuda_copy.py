"""Scattered blocks beside one large page-locked copy, in each direction and in both at once. Also the cost of small
pieces.

Everything that is compared is measured in the same run, in turns. Without a GPU there are no rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from aoffload.cuda import CudaOptions
from aoffload.ledger import Direction

from .cuda_copying import NUM_BLOCKS_MOVED, SECONDS, Copying, cuda_device, rate_row
from .harness import Row, Subject, interleave, timed
from .peer import Peer

__all__ = ["copy_rows", "piece_rows", "run"]

SMALL_PIECE_BYTES = 4 * 1024


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_copy")) is None:
        return
    yield from copy_rows(device, CudaOptions(), piece_bytes=64 * 1024, wanted=0.9)
    yield from copy_rows(device, CudaOptions(), piece_bytes=16 * 1024, wanted=0.7)
    yield from piece_rows(device, CudaOptions())


def copy_rows(
    device: torch.device, options: CudaOptions, piece_bytes: int, wanted: float, num_moved: int = NUM_BLOCKS_MOVED,
    seconds: float = SECONDS,
) -> list[Row]:  # fmt: skip
    """Scattered blocks each way and both ways at once, beside one large copy the same way."""
    copying = Copying(device, options, piece_bytes, num_moved)
    ways = {"store": (Direction.STORE,), "load": (Direction.LOAD,), "both ways": tuple(Direction)}
    subjects: dict[str, Subject] = {}
    for name, directions in ways.items():
        subjects[name] = lambda directions=directions: timed(lambda: copying.move(*directions))  # type: ignore[misc]
        subjects[f"large {name}"] = lambda directions=directions: timed(  # type: ignore[misc]
            lambda: copying.move_large(*directions)
        )
    found = interleave(subjects, seconds=seconds)
    copying.close()
    about = f"blocks of 2 MiB in pieces of {piece_bytes // 1024} KiB"
    return [
        rate_row(f"{name}, {about}", copying.gigabytes * len(directions), found[name], found[f"large {name}"],
                 min(wanted, 0.85) if len(directions) > 1 else wanted)
        for name, directions in ways.items()
    ]  # fmt: skip


def piece_rows(device: torch.device, options: CudaOptions, num_moved: int = 8, seconds: float = 1.0) -> Iterator[Row]:
    """Time of the copy engine for each of many small pieces, beside the time of the same bytes in one large copy."""
    with Copying(device, options, piece_bytes=64 * 1024, num_moved=num_moved) as copying:
        for direction in Direction:
            yield _piece_row(copying, direction, seconds)


def _piece_row(copying: Copying, direction: Direction, seconds: float) -> Row:
    pieces = copying.scattered(direction, SMALL_PIECE_BYTES)
    num_pieces = len(pieces)
    subjects: dict[str, Subject] = {
        "pieces": lambda: timed(lambda: copying.copy_by_engine(pieces, direction)),
        "large": lambda: timed(lambda: copying.move_large(direction)),
    }
    found = interleave(subjects, seconds=seconds)
    each_us, limit_us = (found[name].median_s / num_pieces * 1e6 for name in subjects)
    return Row(
        name=f"{direction.value}, each of many pieces of 4 KiB by the engine", value=each_us, unit="us",
        spread=f"{found['pieces'].low_s / num_pieces * 1e6:.3g}-{found['pieces'].high_s / num_pieces * 1e6:.3g}",
        against="its bytes in one large copy", limit=limit_us, ratio=each_us / limit_us,
    )  # fmt: skip

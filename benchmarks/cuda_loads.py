"""Time of a load for the task that waits for it, from `launch` in the event loop to the task, by size. The call of
`launch`, which blocks the loop, is also shown alone. The device is idle, or stores are in progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import attrs
import numpy as np
import torch

from aoffload.cuda import CudaOptions
from aoffload.ledger import Completion, Direction, Outcome

from .cuda_copying import ENGINE, KIB, MIB, Copying, cuda_device
from .cuda_overlap import traffic
from .harness import Measured, Row, interleave, timed
from .peer import Peer
from .sizes import sized

__all__ = ["load_rows", "run"]

BLOCK_BYTES = 512 * KIB
SMALLER = sized(1, 64)
"""Divisor of the block size in a dry run."""
NUM_BLOCKS = (1, 256, 8, 32)
"""Blocks per load, most important first."""
NUM_ROUNDS = sized(200, 5)
BESIDE = sized(64, 1)
"""Blocks of 2 MiB that are stored repeatedly during the loads."""


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_loads")) is not None:
        yield from load_rows(device)


def load_rows(
    device: torch.device,
    options: CudaOptions = ENGINE,
    sizes: tuple[int, ...] = NUM_BLOCKS,
    num_rounds: int = NUM_ROUNDS,
) -> Iterator[Row]:
    """Percentiles for each number of blocks, beside the time of the same bytes at the rate of one large copy."""
    size = BLOCK_BYTES // SMALLER
    with Copying(device, options, size, num_moved=max(sizes), block_bytes=size) as copying:
        large = interleave({"large": lambda: timed(lambda: copying.move_large(Direction.LOAD))}, seconds=0.0)["large"]
        for num_blocks in sizes:
            yield from _rows(copying, num_blocks, num_rounds, large, "")
        with Copying(device, options, piece_bytes=64 * KIB, num_moved=BESIDE) as stores:
            for num_blocks in sizes[:2]:
                with traffic(stores, [], (Direction.STORE,)):
                    yield from _rows(copying, num_blocks, num_rounds, large, " beside stores")


def _rows(copying: Copying, num_blocks: int, num_rounds: int, large: Measured, beside: str) -> Iterator[Row]:
    took = asyncio.run(_loads(copying, num_blocks, num_rounds))
    size = num_blocks * BLOCK_BYTES
    limit_s = large.median_s * num_blocks / copying.num_moved
    about = f"load of {size // MIB} MiB" if size >= MIB else f"load of {size // KIB} KiB"
    for share in (50, 99):
        loaded_s = float(np.percentile([each.loaded_s for each in took], share))
        yield Row(
            name=f"{about}{beside}, p{share}", value=loaded_s * 1e6, unit="us", against="its bytes in one large copy",
            limit=limit_s * 1e6, ratio=loaded_s / limit_s,
        )  # fmt: skip
    launched_s, loaded_s = (float(np.median([getattr(each, name) for each in took])) for name in NAMES)
    yield Row(
        name=f"{about}{beside}, the call", value=launched_s * 1e6, unit="us", against="until it is loaded",
        limit=loaded_s * 1e6, ratio=launched_s / loaded_s,
    )  # fmt: skip


NAMES = ("launched_s", "loaded_s")


@attrs.frozen
class Load:
    launched_s: float
    """Seconds of the call of `launch`, in the event loop."""
    loaded_s: float
    """Seconds from the beginning of that call to the task."""


async def _loads(copying: Copying, num_blocks: int, num_rounds: int) -> list[Load]:
    return [await _load(copying, num_blocks) for _ in range(num_rounds)]


async def _load(copying: Copying, num_blocks: int) -> Load:
    loop = asyncio.get_running_loop()
    heard: asyncio.Future[Completion] = loop.create_future()

    def hear(completion: Completion) -> None:
        loop.call_soon_threadsafe(heard.set_result, completion)

    copying.hear = hear
    began_s = time.perf_counter()
    copying.launch_job(Direction.LOAD, 0, num_blocks)
    launched_s = time.perf_counter() - began_s
    completion = await heard
    loaded_s = time.perf_counter() - began_s
    assert completion.outcome is Outcome.LANDED, completion
    return Load(launched_s, loaded_s)

"""The rate of copies that an event loop launches and whose ends it receives, while idle and while busy with Python."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import torch

from aoffload.cuda import CudaOptions
from aoffload.ledger import Completion, Direction, Outcome

from .cuda_copying import ENGINE, KIB, NUM_BLOCKS_MOVED, SECONDS, Copying, cuda_device, share_row
from .cuda_latency import TURN_S, turns_of
from .harness import Row, Sample, interleave
from .peer import Peer

__all__ = ["busy_rows", "run"]


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_busy")) is not None:
        yield from busy_rows(device)


def busy_rows(
    device: torch.device,
    options: CudaOptions = ENGINE,
    num_moved: int = NUM_BLOCKS_MOVED,
    seconds: float = SECONDS / 2,
) -> Iterator[Row]:
    """For each direction, gigabytes per second beside turns of 300 us, compared with those of an idle loop."""
    turns_s = {"idle": 0.0, "busy": TURN_S}
    with Copying(device, options, 64 * KIB, num_moved) as copying:
        for direction in Direction:
            subjects = {name: partial(_sample, copying, direction, turn_s) for name, turn_s in turns_s.items()}
            found = interleave(subjects, seconds=seconds)
            about = f"{direction.value} beside turns of {TURN_S * 1e6:.0f} us"
            yield share_row(about, copying.gigabytes, "GB/s", found, "idle", "busy", 0.9)


def _sample(copying: Copying, direction: Direction, turn_s: float) -> Sample:
    return asyncio.run(_move(copying, direction, turn_s))


async def _move(copying: Copying, direction: Direction, turn_s: float) -> Sample:
    """Launch the jobs for all blocks in the loop, and wait until the loop has received the completions of all of
    them."""
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[Completion] = asyncio.Queue()

    def hear(completion: Completion) -> None:
        loop.call_soon_threadsafe(heard.put_nowait, completion)

    copying.hear = hear
    turning = asyncio.create_task(turns_of(turn_s))
    await asyncio.sleep(0)  # the first turn
    cpu, began_s = time.thread_time(), time.perf_counter()
    for _ in range(copying.launch(direction)):
        completion = await heard.get()
        assert completion.outcome is Outcome.LANDED, completion
    took = Sample(time.perf_counter() - began_s, time.thread_time() - cpu)
    turning.cancel()
    return took

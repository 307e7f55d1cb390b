"""Time from the end of a copy on the device to the task that waits for it, by both ways to wait: blocked in the driver,
or polling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch

from aoffload._transfer.backends.cuda.events import WaitPolicy
from aoffload._transfer.region import regions_of
from aoffload._transfer.turns import Turns
from aoffload.cuda import AdaptivePolling, BlockingWait, CudaBackend, CudaOptions

from .cuda_copying import cuda_device
from .harness import Row
from .peer import Peer
from .sizes import sized

__all__ = ["TURN_S", "latency_rows", "run", "turns_of"]

TURN_S = 300e-6
NUM_WAITS = sized(200, 5)


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_latency")) is not None:
        yield from latency_rows(device)


def latency_rows(device: torch.device) -> Iterator[Row]:
    """From the end on the device to the waiting task, p50 and p99, for both ways to wait, with the loop idle and
    busy."""
    policies: dict[str, WaitPolicy] = {"blocking": BlockingWait(), "polling": AdaptivePolling()}
    for state, turn_s in (("idle", 0.0), ("busy", TURN_S)):
        found = asyncio.run(_latencies(device, policies, turn_s))
        for share in (50, 99):
            blocking, polling = (float(np.percentile(found[name], share)) * 1e6 for name in policies)
            yield Row(
                name=f"fence to task, loop {state}, p{share}, blocking", value=blocking, unit="us",
                against="polling", limit=polling, ratio=blocking / polling,
            )  # fmt: skip


async def _latencies(device: torch.device, policies: dict[str, WaitPolicy], turn_s: float) -> dict[str, list[float]]:
    """Latencies in seconds, by policy. The policies take turns."""
    regions = regions_of(torch.zeros(4, 1024, device=device))
    backends = {name: CudaBackend(regions, options=CudaOptions(waiting=policy)) for name, policy in policies.items()}
    found: dict[str, list[float]] = {name: [] for name in policies}
    turning, turns = asyncio.create_task(turns_of(turn_s)), Turns()
    turns.begin()  # threads get their turn as they do while a transport copies
    for _ in range(NUM_WAITS):
        for name, backend in backends.items():
            found[name].append(await _latency(backend))
    turns.close()
    turning.cancel()
    return found


async def turns_of(turn_s: float) -> None:
    """Keep the event loop busy with turns of Python of that length. If it is 0, leave the loop idle."""
    while turn_s:
        end = time.perf_counter() + turn_s
        while time.perf_counter() < end:
            pass
        await asyncio.sleep(0)


async def _latency(backend: CudaBackend) -> float:
    """Seconds from the end of the work to the task. The device's clock measures it from an event of known host time."""
    before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    before.synchronize()
    known_s = time.perf_counter()
    torch.cuda._sleep(3_000_000)  # type: ignore[no-untyped-call]
    behind.record()
    fence, loop, is_over = backend.record_fence(), asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        fence.synchronize()
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=wait).start()
    await is_over.wait()
    heard_s = time.perf_counter()
    return heard_s - known_s - float(before.elapsed_time(behind)) / 1e3

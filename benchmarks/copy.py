"""Copying scattered blocks of 2 MiB through `LocalTransport`, as a share of one plain memmove in the same run.

`python -m benchmarks.copy` prints the table. The event loop is idle: nothing else runs in this process.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from aoffload.core.plan import Completion, Outcome, Tier, TransferPlan
from aoffload.env import Env
from aoffload.transfer.local import LocalTransport

__all__ = ["run"]

MIB = 2**20
BLOCK_BYTES = 2 * MIB
NUM_DEVICE_BLOCKS = 160
NUM_BLOCKS_MOVED = 64
BLOCKS_PER_JOB = 16
NUM_ROUNDS = 7


def run() -> list[dict[str, Any]]:
    """One row per direction and layout: GB/s of payload, the limit of this run, and their ratio."""
    one_region = torch.ones(NUM_DEVICE_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    rows = measure("one region of 2 MiB", one_region)
    del one_region
    layers = [torch.ones(NUM_DEVICE_BLOCKS, BLOCK_BYTES // 32, dtype=torch.uint8) for _ in range(32)]
    return rows + measure("32 regions of 64 KiB", layers)


def measure(layout: str, kv_caches: object) -> list[dict[str, Any]]:
    """Store and load the same scattered blocks, each round next to a memmove of as many bytes."""
    transport = LocalTransport(kv_caches)
    completions: SimpleQueue[Completion] = SimpleQueue()
    transport.open(NUM_BLOCKS_MOVED, verify=False, deliver=completions.put, env=Env())
    on_device = random.Random(0).sample(range(1, NUM_DEVICE_BLOCKS), NUM_BLOCKS_MOVED)
    source, destination = np.ones((2, NUM_BLOCKS_MOVED * BLOCK_BYTES), dtype=np.uint8)
    timings: dict[str, list[float]] = {"store": [], "load": [], "limit": []}
    for _ in range(NUM_ROUNDS):
        for name in ("store", "load"):
            timings[name].append(_seconds(lambda name=name: _move(transport, completions, name, on_device)))
        timings["limit"].append(_seconds(lambda: np.copyto(destination, source)))
    transport.close(timeout_s=10)
    # The first round touches the host memory for the first time.
    gb_per_s = {
        name: NUM_BLOCKS_MOVED * BLOCK_BYTES / statistics.median(found[1:]) / 1e9 for name, found in timings.items()
    }
    limit = gb_per_s["limit"]
    return [
        {"name": f"{name}, {layout}", "value": speed, "unit": "GB/s", "limit": limit, "ratio": speed / limit}
        for name, speed in gb_per_s.items()
        if name != "limit"
    ]


def _move(transport: LocalTransport, completions: SimpleQueue[Completion], name: str, on_device: list[int]) -> None:
    tiers = (Tier.DEVICE, Tier.HOST) if name == "store" else (Tier.HOST, Tier.DEVICE)
    num_jobs = 0
    for start in range(0, NUM_BLOCKS_MOVED, BLOCKS_PER_JOB):
        device_ids = array("i", on_device[start : start + BLOCKS_PER_JOB])
        host_ids = array("i", range(start, start + BLOCKS_PER_JOB))
        ids = (device_ids, host_ids) if name == "store" else (host_ids, device_ids)
        transport.launch(TransferPlan(num_jobs, *tiers, *ids), None)
        num_jobs += 1
    for _ in range(num_jobs):
        assert completions.get(timeout=60).outcome is Outcome.LANDED


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    for row in run():
        print(f"{row['name']:<30} {row['value']:6.2f} {row['unit']}  of {row['limit']:6.2f}  {row['ratio']:4.0%}")


if __name__ == "__main__":
    main()

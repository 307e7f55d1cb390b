"""Copying scattered blocks of 2 MiB through `LocalTransport`, as a share of one plain memmove in the same run.

The event loop is idle: nothing else runs in this process.
"""

from __future__ import annotations

import random
from array import array
from queue import SimpleQueue

import numpy as np
import torch

from aoffload.core.plan import Completion, Outcome, Tier, TransferPlan
from aoffload.env import Env
from aoffload.transfer.local import LocalTransport

from .harness import Measured, Row, Subject, interleave, timed
from .peer import Peer

__all__ = ["run"]

MIB = 2**20
BLOCK_BYTES = 2 * MIB
NUM_DEVICE_BLOCKS = 160
NUM_BLOCKS_MOVED = 64
BLOCKS_PER_JOB = 16


def run(vllm: Peer | None = None) -> list[Row]:
    """One row per direction and layout: GB/s of payload beside one plain memmove."""
    one_region = torch.ones(NUM_DEVICE_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    rows = measure("one region of 2 MiB", one_region)
    del one_region
    layers = [torch.ones(NUM_DEVICE_BLOCKS, BLOCK_BYTES // 32, dtype=torch.uint8) for _ in range(32)]
    return rows + measure("32 regions of 64 KiB", layers)


def measure(layout: str, kv_caches: object) -> list[Row]:
    """Store and load the same scattered blocks, each round next to a memmove of as many bytes."""
    transport = LocalTransport(kv_caches)
    completions: SimpleQueue[Completion] = SimpleQueue()
    transport.open(NUM_BLOCKS_MOVED, verify=False, deliver=completions.put, env=Env())
    on_device = random.Random(0).sample(range(1, NUM_DEVICE_BLOCKS), NUM_BLOCKS_MOVED)
    source, destination = np.ones((2, NUM_BLOCKS_MOVED * BLOCK_BYTES), dtype=np.uint8)
    subjects: dict[str, Subject] = {
        name: lambda name=name: timed(lambda: _move(transport, completions, name, on_device))  # type: ignore[misc]
        for name in ("store", "load")
    }
    subjects["memmove"] = lambda: timed(lambda: np.copyto(destination, source))
    measured = interleave(subjects, seconds=2.0)
    transport.close(timeout_s=10)
    return [_row(f"{name}, {layout}, loop idle", measured[name], measured["memmove"]) for name in ("store", "load")]


def _row(name: str, ours: Measured, limit: Measured) -> Row:
    gigabytes = NUM_BLOCKS_MOVED * BLOCK_BYTES / 1e9
    return Row(
        name=name, value=gigabytes / ours.median_s, unit="GB/s",
        spread=f"{gigabytes / ours.high_s:.3g}-{gigabytes / ours.low_s:.3g}",
        against="one memmove", limit=gigabytes / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=0.9,
    )  # fmt: skip


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

"""Copying scattered blocks of 2 MiB through `LocalTransport`, as a share of one plain memmove in the same run.

Pools that were churned for long: no two blocks of a job are neighbours on the device. The loop idle: this thread waits.
Busy: it runs an event loop whose turns of 300 µs never end, as one with a thousand clients.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from queue import SimpleQueue

import numpy as np
import torch

from aoffload.core.plan import Completion, Outcome, Tier, TransferPlan
from aoffload.env import Env
from aoffload.transfer.local import LocalTransport

from .harness import Measured, Row, Sample, Subject, interleave, timed
from .peer import Peer

__all__ = ["run"]

MIB = 2**20
BLOCK_BYTES = 2 * MIB
NUM_DEVICE_BLOCKS = 160
NUM_BLOCKS_MOVED = 64
BLOCKS_PER_JOB = 16
TURN_S = 300e-6


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
    for name in ("store", "load"):
        subjects[f"{name}, busy"] = lambda name=name: asyncio.run(  # type: ignore[misc]
            _move_beside(transport, completions, name, on_device)
        )
    subjects["memmove"] = lambda: timed(lambda: np.copyto(destination, source))
    measured = interleave(subjects, seconds=3.0)
    transport.close(timeout_s=10)
    rows: list[Row] = []
    for name in ("store", "load"):
        rows.append(_row(f"{name}, {layout}, loop idle", measured[name], measured["memmove"], 0.9))
        rows.append(_row(f"{name}, {layout}, loop busy", measured[f"{name}, busy"], measured["memmove"], 0.75))
    return rows


def _row(name: str, ours: Measured, limit: Measured, wanted: float) -> Row:
    gigabytes = NUM_BLOCKS_MOVED * BLOCK_BYTES / 1e9
    return Row(
        name=name, value=gigabytes / ours.median_s, unit="GB/s",
        spread=f"{gigabytes / ours.high_s:.3g}-{gigabytes / ours.low_s:.3g}",
        against="one memmove", limit=gigabytes / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip


def _move(transport: LocalTransport, completions: SimpleQueue[Completion], name: str, on_device: list[int]) -> None:
    for _ in range(_launch(transport, name, on_device)):
        assert completions.get(timeout=60).outcome is Outcome.LANDED


async def _move_beside(
    transport: LocalTransport, completions: SimpleQueue[Completion], name: str, on_device: list[int]
) -> Sample:
    """The same beside turns that last `TURN_S`, one after the other."""
    cpu, wall = time.thread_time(), time.perf_counter()
    missing = _launch(transport, name, on_device)
    while missing:
        end = time.perf_counter() + TURN_S
        while time.perf_counter() < end:
            pass
        await asyncio.sleep(0)
        while not completions.empty():
            assert completions.get().outcome is Outcome.LANDED
            missing -= 1
    return Sample(time.perf_counter() - wall, time.thread_time() - cpu)


def _launch(transport: LocalTransport, name: str, on_device: list[int]) -> int:
    """How many jobs were launched."""
    tiers = (Tier.DEVICE, Tier.HOST) if name == "store" else (Tier.HOST, Tier.DEVICE)
    for number, start in enumerate(range(0, NUM_BLOCKS_MOVED, BLOCKS_PER_JOB)):
        device_ids = array("i", on_device[start : start + BLOCKS_PER_JOB])
        host_ids = array("i", range(start, start + BLOCKS_PER_JOB))
        ids = (device_ids, host_ids) if name == "store" else (host_ids, device_ids)
        transport.launch(TransferPlan(number, *tiers, *ids), None)
    return number + 1

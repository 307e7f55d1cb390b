"""The delay of the event loop: 1,000 requests in flight and copies at full rate, compared with an idle loop. Also the
same with a disk, below a host that holds half of the prompts, so that fetches and stores of the disk never stop.

A heartbeat of 1 ms measures the delay of each beat. Idle and loaded phases alternate in pairs. The result is the median
over the pairs of the difference of their 99th percentiles.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Iterator

import anyio
import numpy as np
import torch

from aoffload import DiskTier, KVCacheGroup, OffloadConfig, OffloadRuntime

from .cycle import BLOCK_SIZE, Tokens, prompts_of
from .disk_start import directory
from .harness import Row
from .peer import Peer

__all__ = ["lag_row", "run"]

BEAT_S = 0.001
NUM_BEATS = 10_000
NUM_PAIRS = 5
NUM_CLIENTS = 1000
BLOCKS_PER_PROMPT = 8
NUM_DEVICE = 2000
DISK_BYTES = 4 * 2**30
FLOATS_PER_BLOCK = 64 * 1024
"""256 KiB, so a load is 2 MiB."""
MOST_MS, MOST_WITH_DISK_MS = 3.0, 8.0


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """Milliseconds that the load adds to the delay at its 99th percentile, without and with a disk."""
    for with_disk in (False, True):
        yield lag_row(with_disk=with_disk)


def lag_row(*, with_disk: bool, num_pairs: int = NUM_PAIRS, num_beats: int = NUM_BEATS) -> Row:
    with directory() as path:
        disk = DiskTier(str(path / "disk"), DISK_BYTES, daily_writes="1000TB", close_flush_s=0) if with_disk else None
        idle, loaded, gb_per_s, fetched = asyncio.run(_measure(disk, num_pairs, num_beats))
    more = [busy - quiet for quiet, busy in zip(idle, loaded, strict=True)]
    print(f"lag: {gb_per_s:.1f} GB/s loaded meanwhile, {fetched:.2f} GB/s from the disk", file=sys.stderr)
    return Row(
        name=f"event loop lag p99 over idle, 1,000 requests{', disk' if with_disk else ''}",
        value=statistics.median(loaded), unit="ms", spread=f"{min(more):.3g}-{max(more):.3g} more",
        against="idle loop", limit=statistics.median(idle), ratio=statistics.median(more),
        wanted=MOST_WITH_DISK_MS if with_disk else MOST_MS, is_at_most=True,
    )  # fmt: skip


async def _measure(
    disk: DiskTier | None, num_pairs: int, num_beats: int
) -> tuple[list[float], list[float], float, float]:
    """The 99th percentiles in ms, idle and loaded, and the GB/s loaded and fetched meanwhile."""
    prompts = prompts_of(BLOCKS_PER_PROMPT, NUM_CLIENTS)
    groups = [KVCacheGroup("full", block_size=BLOCK_SIZE)]
    num_host_blocks = NUM_CLIENTS * BLOCKS_PER_PROMPT // (1 if disk is None else 2)
    config = OffloadConfig(groups=groups, num_host_blocks=num_host_blocks, namespace="benchmark", disk=disk)
    idle: list[float] = []
    loaded: list[float] = []
    took_s = 0.0
    async with OffloadRuntime(config, torch.zeros(NUM_DEVICE + 1, FLOATS_PER_BLOCK)) as runtime:
        for prompt in prompts:
            await _serve(runtime, prompt)
        await runtime.flush()
        before, from_disk = _loaded(runtime)
        for _ in range(num_pairs):
            idle.append(await _p99(num_beats))
            began = time.perf_counter()
            async with anyio.create_task_group() as clients:
                for number in range(NUM_CLIENTS):
                    clients.start_soon(_client, runtime, prompts, number)
                loaded.append(await _p99(num_beats))
                clients.cancel_scope.cancel()
            took_s += time.perf_counter() - began
            await runtime.flush()
        moved, fetched = _loaded(runtime)
    return idle, loaded, (moved - before) / took_s / 1e9, (fetched - from_disk) / took_s / 1e9


def _loaded(runtime: OffloadRuntime) -> tuple[int, int]:
    """Bytes loaded onto the device and from the disk so far."""
    found = runtime.statistics()
    return found.transfers.bytes_loaded, 0 if found.disk_transfers is None else found.disk_transfers.bytes_loaded


async def _p99(num_beats: int) -> float:
    late: list[float] = []
    for _ in range(num_beats):
        expected = time.perf_counter() + BEAT_S
        await asyncio.sleep(BEAT_S)
        late.append(time.perf_counter() - expected)
    return float(np.percentile(late, 99)) * 1e3


async def _client(runtime: OffloadRuntime, prompts: list[Tokens], first: int) -> None:
    for number in itertools.count(first, 7):
        await _serve(runtime, prompts[number % len(prompts)])


async def _serve(runtime: OffloadRuntime, prompt: Tokens) -> None:
    async with runtime.request(prompt) as request:
        await request.allocate()
        await request.load()
        request.commit(len(prompt))

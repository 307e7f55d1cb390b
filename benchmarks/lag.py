"""How late the event loop is: 1,000 requests in flight and copies at full rate, beside an idle loop.

A heartbeat of 1 ms measures how much later than asked it comes. Idle and loaded stretches alternate in pairs; the
result is the median over the pairs of the difference of their 99th percentiles.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time

import anyio
import numpy as np
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime

from .cycle import BLOCK_SIZE, Tokens, prompts_of
from .harness import Row
from .peer import Peer

__all__ = ["run"]

BEAT_S = 0.001
NUM_BEATS = 10_000
NUM_PAIRS = 5
NUM_CLIENTS = 1000
BLOCKS_PER_PROMPT = 8
NUM_DEVICE = 2000
FLOATS_PER_BLOCK = 64 * 1024
"""256 KiB, so a load is 2 MiB."""
MOST_MS = 3.0


def run(vllm: Peer | None = None) -> list[Row]:
    """One row: milliseconds that the load adds to the lag at its 99th percentile."""
    idle, loaded, gb_per_s = asyncio.run(_measure())
    more = [busy - quiet for quiet, busy in zip(idle, loaded, strict=True)]
    median = statistics.median(more)
    print(f"lag: {gb_per_s:.1f} GB/s loaded meanwhile", file=sys.stderr)
    return [
        Row(
            name="event loop lag p99 over idle, 1,000 requests", value=statistics.median(loaded), unit="ms",
            spread=f"{min(more):.3g}-{max(more):.3g} more", against="idle loop", limit=statistics.median(idle),
            ratio=median, wanted=MOST_MS, is_at_most=True,
        )
    ]  # fmt: skip


async def _measure() -> tuple[list[float], list[float], float]:
    """The 99th percentiles in ms, idle and loaded, and the GB/s loaded meanwhile."""
    prompts = prompts_of(BLOCKS_PER_PROMPT, NUM_CLIENTS)
    groups = [KVCacheGroup("full", block_size=BLOCK_SIZE)]
    config = OffloadConfig(groups=groups, num_host_blocks=NUM_CLIENTS * BLOCKS_PER_PROMPT)
    idle: list[float] = []
    loaded: list[float] = []
    took_s = 0.0
    async with OffloadRuntime(config, torch.zeros(NUM_DEVICE + 1, FLOATS_PER_BLOCK)) as runtime:
        for prompt in prompts:
            await _serve(runtime, prompt)
        await runtime.flush()
        before = runtime.statistics().transfers.bytes_loaded
        for _ in range(NUM_PAIRS):
            idle.append(await _p99())
            began = time.perf_counter()
            async with anyio.create_task_group() as clients:
                for number in range(NUM_CLIENTS):
                    clients.start_soon(_client, runtime, prompts, number)
                loaded.append(await _p99())
                clients.cancel_scope.cancel()
            took_s += time.perf_counter() - began
            await runtime.flush()
        moved = runtime.statistics().transfers.bytes_loaded - before
    return idle, loaded, moved / took_s / 1e9


async def _p99() -> float:
    late: list[float] = []
    for _ in range(NUM_BEATS):
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

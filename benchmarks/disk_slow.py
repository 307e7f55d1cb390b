"""Time to first token with a disk that is ten times too slow to be worth it, and without one.

A request computes the tokens that neither memory has, in a thread that sleeps as long as a device would compute. Each
prompt is on the disk only. The calls of the disk's files take so long that loading is ten times slower than computing.
Runtimes with and without the disk take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import attrs
import torch

from aoffload import DiskTier, KVCacheGroup, OffloadConfig, OffloadRuntime, Tier
from aoffload._tiers.disk.files import DiskDirectory, DiskFile, PosixDirectory
from aoffload.transport import LocalTransport

from .cycle import BLOCK_SIZE, Tokens, prompts_of
from .disk_start import directory
from .harness import Row
from .peer import Peer

__all__ = ["run", "slow_rows"]

BLOCK_BYTES = 16 * 2**10
NUM_BLOCKS, NUM_PROMPTS = 32, 24
TOKENS_PER_S = 10_000.0
RATE = TOKENS_PER_S / BLOCK_SIZE * BLOCK_BYTES / 10
"""Bytes per second of the disk. Computing is ten times as fast."""
NUM_ROUNDS = 3
WANTED = 1.05


@attrs.frozen(eq=False)
class SlowFile:
    """A file whose reads are slow."""

    file: DiskFile

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read(self, offset: int, buffers: Sequence[Any]) -> int:
        found = self.file.read(offset, buffers)
        time.sleep(found / RATE)  # in a thread of the disk
        return found


@attrs.frozen(eq=False)
class SlowDirectory:
    directory: PosixDirectory

    def open(self, name: str) -> Any:
        file = self.directory.open(name)
        return SlowFile(file) if name == "slab" else file

    def make_direct(self, file: Any, block_bytes: int, address: int) -> Any:
        self.directory.make_direct(file.file, block_bytes, address)
        return file

    def close(self) -> None:
        self.directory.close()


def run(vllm: Peer | None = None) -> list[Row]:
    """The median over requests, relative to that without a disk."""
    return slow_rows()


def slow_rows(num_rounds: int = NUM_ROUNDS) -> list[Row]:
    with directory() as path:
        with_disk, without, declined = asyncio.run(_measure(path / "disk", num_rounds))
    value, limit = statistics.median(with_disk), statistics.median(without)
    return [
        Row(name="disk a tenth as fast as computing: first token, p50", value=value * 1e3, unit="ms",
            against="no disk", limit=limit * 1e3, ratio=value / limit, wanted=WANTED, is_at_most=True,
            spread=f"{declined} not fetched"),
    ]  # fmt: skip


async def _measure(path: Path, num_rounds: int) -> tuple[list[float], list[float], int]:
    prompts = prompts_of(NUM_BLOCKS, NUM_PROMPTS)
    with_disk, without = list[float](), list[float]()
    async with AsyncExitStack() as held:
        slow = await held.enter_async_context(_runtime(path))
        plain = await held.enter_async_context(_runtime(None))
        await slow.disk.wait_restored()
        for prompt in prompts:
            await _first_token(slow, prompt)
            await slow.flush()
        while plans := slow.ledger.disk.plan_flush(1024):
            slow.worker.submit(plans)
            await slow.flush()
        sides: Iterator[tuple[OffloadRuntime, list[float]]] = itertools.cycle([(slow, with_disk), (plain, without)])
        for prompt in prompts * num_rounds:
            for runtime, took in itertools.islice(sides, 2):
                await runtime.reset(Tier.HOST)
                await runtime.reset(Tier.DEVICE)
                took.append(await _first_token(runtime, prompt))
                await runtime.flush()
        declined = slow.statistics().num_fetches_declined
    return with_disk, without, declined


def _runtime(path: Path | None) -> OffloadRuntime:
    num_blocks = (NUM_PROMPTS + 1) * NUM_BLOCKS
    disk = None if path is None else DiskTier(str(path), 4 * num_blocks * BLOCK_BYTES, close_flush_s=0)
    groups = [KVCacheGroup("full", block_size=BLOCK_SIZE)]
    config = OffloadConfig(groups=groups, num_host_blocks=num_blocks, namespace="benchmark", disk=disk)
    kv_cache = torch.zeros(num_blocks + 1, BLOCK_BYTES, dtype=torch.uint8)
    transport = LocalTransport(kv_cache, disk=disk)
    if transport._disk is not None:
        transport._disk.directory = _slow
    return OffloadRuntime(config, transport=transport)


def _slow(path: str) -> DiskDirectory:
    return SlowDirectory(PosixDirectory(path))


async def _first_token(runtime: OffloadRuntime, prompt: Tokens) -> float:
    """Seconds from the request to the end of its prompt's computation."""
    began = time.perf_counter()
    async with runtime.request(prompt) as request:
        await request.allocate()
        num_ready = await request.load()
        with runtime.step([request]):
            await anyio.to_thread.run_sync(time.sleep, (len(prompt) - num_ready) / TOKENS_PER_S)
        request.commit(len(prompt))
        computed = time.perf_counter()
    return computed - began

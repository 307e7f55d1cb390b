"""Host hits beside a disk that hangs: their time, compared with the same hits while the disk works, and the time of
requests that wait for the disk.

One client hits host memory. Another alternates between prompts that only the disk has and new ones, which are stored.
The files hang in every read and write until the gate opens. Threads and files are real, with a wait before the calls.
Phases alternate. While the disk hangs, only the copies in flight are quarantined. After the gate has opened, no block
is.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import numpy as np
import torch

from aoffload import DiskTier, KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._tiers.disk.files import DiskDirectory, DiskFile, PosixDirectory
from aoffload.transport import LocalTransport

from .cycle import BLOCK_SIZE, Tokens, prompts_of
from .disk_start import directory
from .harness import Row
from .peer import Peer

__all__ = ["Gate", "HangingDirectory", "hung_rows", "run"]

MIB = 2**20
BLOCK_BYTES = 64 * 2**10
NUM_BLOCKS = 8
"""Blocks of a prompt."""
NUM_HOT, NUM_COLD = 64, 256
NUM_HOST, NUM_DEVICE = 1280, 40 * NUM_BLOCKS
NUM_PAIRS = 7
SECONDS = 3.0
FETCH_S, TRANSFER_S = 0.25, 0.5
COLD_EVERY_S = 0.01
INFLIGHT_BYTES = 64 * MIB
WANTED, LATE_MS = 1.2, 50.0


class Gate:
    """Calls of the disk pass through while the gate is open."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def wait(self) -> None:
        self._is_open.wait()


@attrs.frozen(eq=False)
class HangingFile:
    """A file whose reads and writes wait for the gate."""

    file: DiskFile
    gate: Gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, offset: int, buffers: Sequence[Any]) -> int:
        self.gate.wait()
        return self.file.write(offset, buffers)

    def read(self, offset: int, buffers: Sequence[Any]) -> int:
        self.gate.wait()
        return self.file.read(offset, buffers)


@attrs.frozen(eq=False)
class HangingDirectory:
    """A directory of the system with such files."""

    directory: PosixDirectory
    gate: Gate

    def open(self, name: str) -> Any:
        return HangingFile(self.directory.open(name), self.gate)

    def make_direct(self, file: Any, block_bytes: int, address: int) -> Any:
        self.directory.make_direct(file.file, block_bytes, address)
        return file

    def close(self) -> None:
        self.directory.close()


def run(vllm: Peer | None = None) -> list[Row]:
    """Host hits, requests that wait for the disk, and quarantined blocks."""
    return hung_rows()


def hung_rows(num_pairs: int = NUM_PAIRS, seconds: float = SECONDS) -> list[Row]:
    with directory() as path:
        return asyncio.run(_measure(path / "disk", num_pairs, seconds))


@attrs.define
class Stretch:
    hits_s: list[float] = attrs.field(factory=list)
    waits_s: list[float] = attrs.field(factory=list)
    """Times of requests for blocks that only the disk has, up to the end of `allocate`."""
    most_quarantined: int = 0

    @property
    def p99_us(self) -> float:
        return float(np.percentile(self.hits_s, 99)) * 1e6


async def _measure(path: Path, num_pairs: int, seconds: float) -> list[Row]:
    gate = Gate()
    tier = DiskTier(str(path), 300 * MIB, daily_writes="1TB", close_flush_s=0)
    kv_cache = torch.zeros(NUM_DEVICE + 1, BLOCK_BYTES, dtype=torch.uint8)
    transport = LocalTransport(kv_cache, disk=tier)
    assert transport._disk is not None
    transport._disk.directory = lambda path: as_directory(path, gate)
    config = OffloadConfig(
        groups=[KVCacheGroup("full", block_size=BLOCK_SIZE)], num_host_blocks=NUM_HOST, namespace="benchmark",
        disk=tier, fetch_timeout_s=FETCH_S, transfer_timeout_s=TRANSFER_S, store_timeout_s=TRANSFER_S,
    )  # fmt: skip
    prompts = prompts_of(NUM_BLOCKS, NUM_HOT + NUM_COLD)
    hot, cold = prompts[:NUM_HOT], prompts[NUM_HOT:]
    working, hanging = list[Stretch](), list[Stretch]()
    async with OffloadRuntime(config, transport=transport) as runtime:
        await runtime.disk.wait_restored()
        for prompt in (*cold, *cold, *hot, *hot):
            await _serve(runtime, prompt)
            await runtime.flush()
        asked, new = itertools.cycle(cold), (prompt + number for number in itertools.count(1) for prompt in cold)
        try:
            for _ in range(num_pairs):
                working.append(await _stretch(runtime, hot, asked, new, seconds))
                gate.close()
                hanging.append(await _stretch(runtime, hot, asked, new, seconds))
                gate.open()
                await _until_nothing_is_quarantined(runtime)
        finally:
            gate.open()
        runtime.check_integrity()
    return _rows(working, hanging)


def as_directory(path: str, gate: Gate) -> DiskDirectory:
    return HangingDirectory(PosixDirectory(path), gate)


def _rows(working: list[Stretch], hanging: list[Stretch]) -> list[Row]:
    ratios = [two.p99_us / one.p99_us for one, two in zip(working, hanging, strict=True)]
    values, limits = [each.p99_us for each in hanging], [each.p99_us for each in working]
    most = max(each.most_quarantined for each in hanging) * BLOCK_BYTES
    longest = max(wait for each in hanging for wait in each.waits_s)
    num_asked = sum(len(each.waits_s) for each in hanging)
    print(f"disk_hung: {num_asked} requests asked a disk that hung", file=sys.stderr)
    bound = 2 * INFLIGHT_BYTES
    return [
        Row(name="disk hung: host hit of 128 tokens, p99", value=statistics.median(values), unit="us",
            against="disk that works", limit=statistics.median(limits), ratio=statistics.median(ratios), wanted=WANTED,
            is_at_most=True, spread=f"{min(values):.3g}-{max(values):.3g}"),
        Row(name="disk hung: longest wait of a request for it", value=longest * 1e3, unit="ms",
            against="fetch_timeout_s; ms over it", limit=FETCH_S * 1e3, ratio=(longest - FETCH_S) * 1e3, wanted=LATE_MS,
            is_at_most=True),
        Row(name="disk hung: most in quarantine, host and disk", value=most / MIB, unit="MiB",
            against="in flight, both directions", limit=bound / MIB, ratio=most / bound, wanted=1.0, is_at_most=True),
    ]  # fmt: skip


async def _stretch(
    runtime: OffloadRuntime, hot: list[Tokens], cold: Iterator[Tokens], new: Iterator[Tokens], seconds: float
) -> Stretch:
    found = Stretch()
    until = time.perf_counter() + seconds

    async def ask() -> None:
        while time.perf_counter() < until:
            began = time.perf_counter()
            async with runtime.request(next(cold)) as request:
                await request.allocate()
                found.waits_s.append(time.perf_counter() - began)
                await request.load()
                request.commit(NUM_BLOCKS * BLOCK_SIZE + 1)
            await _serve(runtime, next(new))
            await anyio.sleep(COLD_EVERY_S)

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        for prompt in itertools.cycle(hot):
            began = time.perf_counter()
            if began >= until:
                break
            num_hit = await _serve(runtime, prompt)
            if num_hit:
                found.hits_s.append(time.perf_counter() - began)
            found.most_quarantined = max(found.most_quarantined, _num_quarantined(runtime))
            await anyio.lowlevel.checkpoint()
    return found


async def _serve(runtime: OffloadRuntime, prompt: Tokens) -> int:
    """Number of tokens that hit host memory."""
    async with runtime.request(prompt) as request:
        await request.allocate()
        num_hit = request.match.num_host_tokens
        await request.load()
        request.commit(len(prompt))
    return num_hit


def _num_quarantined(runtime: OffloadRuntime) -> int:
    found = runtime.statistics()
    assert found.disk is not None
    return found.host.num_quarantined + found.disk.num_quarantined


async def _until_nothing_is_quarantined(runtime: OffloadRuntime) -> None:
    with anyio.fail_after(10.0):
        while _num_quarantined(runtime):  # noqa: ASYNC110 - a benchmark: nothing says when
            await anyio.sleep(0.01)

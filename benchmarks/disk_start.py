"""A runtime starts on a disk of 500,000 slots, all of them in use. Measured are the time until it has read them, and
the delay of a heartbeat in its event loop meanwhile, compared with the same loop when idle. Starts and idle phases
alternate."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from aoffload import DiskTier, KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._config.tiers import ROUNDING_BYTES, SUPERBLOCK_BYTES, record_bytes
from aoffload._tiers.disk.plans import BlockLabel
from aoffload._tiers.disk.slots import DiskSlots
from aoffload.transport import LocalTransport

from .harness import Row
from .heart import Heart
from .peer import Peer

__all__ = ["UNIT_TOKENS", "directory", "filled", "labels", "run", "start_rows"]

NUM_SLOTS = 500_000
NUM_STARTS = 5
IDLE_S = 3.0
READY_S = 5.0
MORE_MS = 8.0
UNIT_TOKENS = 16
PROMPT_UNITS = 100
BLOCK_BYTES = 512


def run(vllm: Peer | None = None) -> list[Row]:
    """Two rows: seconds until all slots are read, and the increase of the heartbeat's 99th percentile during the
    start."""
    return start_rows()


def start_rows(num_slots: int = NUM_SLOTS, num_starts: int = NUM_STARTS, idle_s: float = IDLE_S) -> list[Row]:
    with directory() as path:
        tier = filled(path / "disk", num_slots)
        found = asyncio.run(_starts(tier, num_slots, num_starts, idle_s))
    took, idle, busy, longest = (list(column) for column in zip(*found, strict=True))
    ready, more = statistics.median(took), statistics.median([one - two for one, two in zip(busy, idle, strict=True)])
    print(f"disk_start: the longest beats {', '.join(f'{each:.0f}' for each in longest)} ms late", file=sys.stderr)
    return [
        Row(name=f"disk: {num_slots:,} slots ready", value=ready, unit="s", spread=f"{min(took):.3g}-{max(took):.3g}",
            against="limit", limit=READY_S, ratio=ready / READY_S, wanted=1.0, is_at_most=True),
        Row(name=f"event loop lag p99 over idle, start with {num_slots:,} slots", value=statistics.median(busy),
            unit="ms", spread=f"{min(busy):.3g}-{max(busy):.3g}", against="idle loop", limit=statistics.median(idle),
            ratio=more, wanted=MORE_MS, is_at_most=True),
    ]  # fmt: skip


async def _starts(
    tier: DiskTier, num_slots: int, num_starts: int, idle_s: float
) -> list[tuple[float, float, float, float]]:
    """For each start: seconds, the heartbeat's percentile idle and meanwhile, in ms, and the longest beat."""
    found = []
    for _ in range(num_starts):
        idle, heart = Heart(), Heart()
        await idle.during(asyncio.sleep(idle_s))
        async with heart.beating() as stop:
            began_s = time.perf_counter()
            async with _runtime(tier) as runtime:
                await runtime.disk.wait_restored()
                took_s = time.perf_counter() - began_s
                stop()
                on_disk = runtime.statistics().disk
                assert on_disk is not None and on_disk.num_cached == num_slots, on_disk
        found.append((took_s, idle.p99_ms, heart.p99_ms, heart.longest_ms))
    return found


def _runtime(tier: DiskTier) -> OffloadRuntime:
    groups = [KVCacheGroup("full", block_size=UNIT_TOKENS)]
    config = OffloadConfig(groups=groups, num_host_blocks=64, namespace="benchmark", disk=tier)
    kv_cache = torch.zeros(65, BLOCK_BYTES, dtype=torch.uint8)
    return OffloadRuntime(config, transport=LocalTransport(kv_cache, disk=tier))


def filled(path: Path, num_slots: int) -> DiskTier:
    """A disk whose slots are all in use, as after many stores."""
    size = num_slots * (BLOCK_BYTES + record_bytes(UNIT_TOKENS)) + SUPERBLOCK_BYTES + ROUNDING_BYTES
    tier = DiskTier(str(path), size, close_flush_s=0)

    async def fill() -> None:
        runtime = _runtime(tier)
        async with runtime:
            await runtime.disk.wait_restored()
            lanes = runtime._session.transport._disk._lanes  # type: ignore[attr-defined]
            _fill(lanes.slots, num_slots)

    asyncio.run(fill())
    return tier


def _fill(slots: DiskSlots, num_slots: int) -> None:
    """Write a record for every slot."""
    given = labels(random.Random(0))
    table, number = slots._table, itertools.count()
    for first in range(0, num_slots, 4096):
        stop = min(first + 4096, num_slots)
        records = [
            table.form.encoded(next(given), slot, slots.generation, next(number), bytes(16))
            for slot in range(first, stop)
        ]
        table.write(first, records)


def labels(rng: random.Random) -> Iterator[BlockLabel]:
    """Blocks of prompts, prompt after prompt."""
    root = hashlib.sha256(b"root").digest()
    while True:
        hasher, before = hashlib.sha256(root), b""
        for position in range(PROMPT_UNITS):
            tokens = rng.randbytes(UNIT_TOKENS * 4)
            hasher.update(tokens)
            digest = hasher.digest()
            yield BlockLabel(0, 0, position, root, digest, before, tokens)
            before = digest


@contextmanager
def directory() -> Iterator[Path]:
    """A directory on the measured disk, for the duration of the block."""
    at = Path(os.environ.get("AOFFLOAD_BENCH_DISK", "build/bench"))
    at.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="disk_", dir=at))
    try:
        yield path
    finally:
        shutil.rmtree(path)

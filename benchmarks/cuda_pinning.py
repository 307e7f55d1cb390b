"""Opening a pool of page-locked host memory: its time, the time to free it, and the delay of the event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import attrs
import torch

from aoffload.cuda import CudaBackend, CudaOptions
from aoffload.transport import Env, LocalTransport

from .cuda_copying import ENGINE, MIB, cuda_device, expected_row
from .harness import Row
from .peer import Peer
from .sizes import sized

__all__ = ["free_bytes", "pinning_rows", "run"]

SIZES_MIB = (4096, 1024, 16384)
SMALLER = sized(1, 256)
"""Divisor of the pool sizes in a dry run."""
BEAT_S = 0.001
EXPECTED_GIB_PER_S = 3.0
MOST_OF_MEMORY = 0.5
"""A pool larger than this share of the free memory is not tried, because the limit of a container kills the process
instead of raising an error."""
CGROUP = Path("/sys/fs/cgroup")


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """Three rows for each size. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_pinning")) is not None:
        yield from pinning_rows(device)


def pinning_rows(
    device: torch.device, options: CudaOptions = ENGINE, sizes_mib: tuple[int, ...] = SIZES_MIB
) -> Iterator[Row]:
    for mib in sizes_mib:
        if mib * MIB // SMALLER > MOST_OF_MEMORY * free_bytes():
            print(f"cuda_pinning: not {mib} MiB, since {free_bytes() // MIB} MiB are free", file=sys.stderr)
            continue
        found = asyncio.run(_opened(device, options, mib // SMALLER))
        gib, about = mib / 1024, f"{mib} MiB of host memory"
        kind = "page-locked" if found.is_page_locked else "PAGEABLE"
        rate = gib / found.open_s
        yield expected_row(f"opening {about}", rate, "GiB/s", EXPECTED_GIB_PER_S, spread=kind)
        yield expected_row(f"closing {about}", gib / found.close_s, "GiB/s", EXPECTED_GIB_PER_S)
        yield Row(
            name=f"longest gap of the event loop, opening {about}", value=found.gap_s * 1e3, unit="ms",
            against="idle loop", limit=found.idle_gap_s * 1e3, ratio=found.gap_s / found.idle_gap_s,
        )  # fmt: skip


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Free memory of the machine, or of the container of this process, if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:  # no such limit here
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


@attrs.frozen
class Opened:
    open_s: float
    close_s: float
    gap_s: float
    """The longest time between two turns of the event loop during the opening. `idle_gap_s`: the same when idle."""
    idle_gap_s: float
    is_page_locked: bool


async def _opened(device: torch.device, options: CudaOptions, mib: int) -> Opened:
    pool = torch.zeros(4, 2 * MIB, dtype=torch.uint8, device=device)
    transport = LocalTransport(pool, partial(CudaBackend, options=options))
    opening = partial(transport.open, mib // 2, verify=False, deliver=lambda found: None, env=Env())
    gaps: list[float] = []
    beating = asyncio.create_task(_beats(gaps))
    began_s = time.perf_counter()
    await asyncio.to_thread(opening)
    open_s, gap_s = time.perf_counter() - began_s, max(gaps, default=BEAT_S)
    assert isinstance(transport.backend, CudaBackend)
    is_page_locked = transport.backend.host.is_page_locked
    began_s = time.perf_counter()
    await asyncio.to_thread(transport.close, 10)
    close_s = time.perf_counter() - began_s
    gaps.clear()
    await asyncio.sleep(min(open_s, 0.5))
    beating.cancel()
    return Opened(open_s, close_s, gap_s, max(gaps, default=BEAT_S), is_page_locked)


async def _beats(gaps: list[float]) -> None:
    while True:
        began_s = time.perf_counter()
        await asyncio.sleep(BEAT_S)
        gaps.append(time.perf_counter() - began_s)

"""The cycle of a request on a host hit, in a process of its own. It uses the modules of the first checkout in the path,
and runs with or without a disk."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import line
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from aoffload import KVCacheGroup, Ledger, OffloadConfig, OffloadRuntime
from aoffload.ledger import Completion, Outcome, Prefix
from benchmarks.api import _batch
from benchmarks.cycle import BLOCK_SIZE, ROOT, prompts_of

HELD = ExitStack()
NUM_AT_A_TIME = 64
BYTES_PER_BLOCK = 64
LEDGERS: dict[int, tuple[Callable[[Any], None], Iterator[Any]]] = {}
RUNTIMES: dict[int, tuple[BlockingPortal, OffloadRuntime, Iterator[Any]]] = {}


def _config(num_host_blocks: int, disk: str | None) -> OffloadConfig:
    groups = [KVCacheGroup("full", block_size=BLOCK_SIZE)]
    if disk is None:
        return OffloadConfig(groups=groups, num_host_blocks=num_host_blocks)
    from aoffload import DiskTier

    path = HELD.enter_context(tempfile.TemporaryDirectory(dir=disk, prefix="disk_"))
    size = 4 * num_host_blocks * (BYTES_PER_BLOCK + 256) + 2**20
    tier = DiskTier(f"{path}/tier", size, close_flush_s=0)
    return OffloadConfig(groups=groups, num_host_blocks=num_host_blocks, namespace="benchmark", disk=tier)


def prepare_ledger(num_blocks: int, disk: str | None) -> None:
    """Two prompts that take turns on a device pool that holds one of them. Both are in host memory, and on the disk."""
    prompts = prompts_of(num_blocks, 2)
    config = _config(2 * num_blocks, disk)
    more = {} if disk is None else {"block_bytes": BYTES_PER_BLOCK}
    ledger = Ledger(config, num_blocks + 2, **more)

    def land(plans: Any) -> None:
        for plan in plans:
            ledger.launch(plan.job_id)
            ledger.settle(Completion(plan.job_id, Outcome.LANDED))

    def cycle(prompt: Any) -> None:
        request = ledger.admit(Prefix.of(ROOT, prompt))
        ledger.allocate_nowait(request)
        land(ledger.plan_load(request))
        land(ledger.commit(request, len(prompt)))
        land(ledger.release(request))
        if disk is not None and ledger.disk.stores_are_due:  # as a runtime asks
            land(ledger.disk.plan_stores(1024, is_idle=True))

    for prompt in (*prompts, *prompts):
        cycle(prompt)
    LEDGERS[num_blocks] = cycle, itertools.cycle(prompts)


def ledger(num_blocks: int, least_s: float) -> dict[str, float]:
    cycle, turns = LEDGERS[num_blocks]
    return line.timed(lambda: cycle(next(turns)), least_s)


def prepare_runtime(num_blocks: int, disk: str | None) -> None:
    """The same for batches of 64 prompts, with real copies."""
    prompts = prompts_of(num_blocks, 2 * NUM_AT_A_TIME)
    kv_cache = torch.zeros(NUM_AT_A_TIME * (num_blocks + 1) + 1, BYTES_PER_BLOCK // 4)
    runtime = OffloadRuntime(_config(len(prompts) * num_blocks, disk), kv_cache)
    portal = HELD.enter_context(start_blocking_portal())
    HELD.enter_context(portal.wrap_async_context_manager(runtime))
    sets = itertools.cycle((prompts[:NUM_AT_A_TIME], prompts[NUM_AT_A_TIME:]))
    RUNTIMES[num_blocks] = portal, runtime, sets
    for _ in range(4):
        runtime_cycle(num_blocks)
        portal.call(runtime.flush)
    if disk is not None:
        portal.call(_all_on_disk, runtime)


async def _all_on_disk(runtime: OffloadRuntime) -> None:
    await runtime.disk.wait_restored()
    await runtime.flush()
    while plans := runtime.ledger.disk.plan_flush(1024):
        runtime.worker.submit(plans)
        await runtime.flush()


def runtime_cycle(num_blocks: int) -> dict[str, float]:
    """One batch. Returns the time per request, of the event loop's thread."""
    portal, runtime, sets = RUNTIMES[num_blocks]
    prompts = next(sets)

    async def batch() -> dict[str, float]:
        cpu, wall = time.thread_time(), time.perf_counter()
        await _batch(runtime, prompts)
        number = len(prompts)
        return {"wall_s": (time.perf_counter() - wall) / number, "cpu_s": (time.thread_time() - cpu) / number}

    return portal.call(batch)


CALLS = {
    "prepare_ledger": prepare_ledger, "ledger": ledger, "prepare_runtime": prepare_runtime, "runtime": runtime_cycle,
}  # fmt: skip

if __name__ == "__main__":
    with HELD:
        line.serve(CALLS)

"""A runtime with a disk, of the system or simulated, over real bytes."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
from serving import GUARD_S, Engine, TensorBlocks, assert_at_rest, config

from aoffload import DiskTier, OffloadRuntime, Tier
from aoffload._transfer.local import LocalTransport
from aoffload.transport import Env
from proof.disk.simulated_disk import DiskFault, IOCall, SimulatedDisk

SIZE = 1 << 18
"""Some 700 slots of 128 bytes."""


def simulated(seed: int = 0) -> SimulatedDisk:
    return SimulatedDisk(random.Random(seed), 1 << 20)


@asynccontextmanager
async def with_disk(
    place: Path | SimulatedDisk,
    num_blocks: int = 8,
    *,
    num_host_blocks: int = 16,
    tier: dict[str, Any] | None = None,
    logger: Any = None,
    observers: Sequence[Any] = (),
    env: Env | None = None,
    **options: Any,
) -> AsyncIterator[Engine]:
    """`num_blocks` usable device blocks, and a host that holds little more: what it evicts goes to the disk at
    `place`."""
    blocks = TensorBlocks(num_blocks + 1)
    path = place / "disk" if isinstance(place, Path) else "simulated"
    disk = DiskTier(path, **{"size": SIZE, **(tier or {})})
    options = {"prefill_tokens_per_s": 1.0, **options}  # whatever it takes: a fetch is sooner
    namespace = options.pop("namespace", "test")
    made = attrs.evolve(config(num_host_blocks, disk=disk, **{"max_fetch_share": 0.5, **options}), namespace=namespace)
    runtime = OffloadRuntime(made, blocks.tensors, logger=logger, observers=observers, env=env)
    if isinstance(place, SimulatedDisk):
        transport = runtime.transport
        assert isinstance(transport, LocalTransport) and transport._disk is not None
        transport._disk.directory = lambda path: place.directory()
    async with runtime:
        yield Engine(runtime, blocks, made.groups[0].block_size)


async def on_the_disk_only(engine: Engine, *prompts: Sequence[int]) -> None:
    """Serve them, and have device and host forget them once the disk has them."""
    for token_ids in prompts:
        await engine.serve(token_ids)
        await stored(engine)
    await engine.runtime.reset(Tier.HOST)
    await engine.runtime.reset(Tier.DEVICE)


async def stored(engine: Engine) -> None:
    """All of the host is on the disk."""
    runtime = engine.runtime
    await runtime.disk.wait_restored()
    await runtime.flush()
    while plans := runtime.ledger.disk.plan_flush(1000):
        runtime.worker.submit(plans)
        await runtime.flush()


class Hanging:
    """Calls of a simulated disk that hang until they are released."""

    def __init__(self, disk: SimulatedDisk, hangs: Callable[[IOCall], bool]) -> None:
        self._go_on = threading.Event()
        self._begun: queue.SimpleQueue[IOCall] = queue.SimpleQueue()
        disk.fault = lambda call: DiskFault.HANG if hangs(call) and not self._go_on.is_set() else None
        disk.hang = self._hang

    def _hang(self, call: IOCall) -> None:
        self._begun.put(call)
        assert self._go_on.wait(GUARD_S)

    async def wait_for(self, num_calls: int = 1) -> None:
        """Wait until so many more calls hang."""
        for _ in range(num_calls):
            await anyio.to_thread.run_sync(lambda: self._begun.get(timeout=GUARD_S))

    def resume(self) -> None:
        self._go_on.set()


def of_slab(kind: str) -> Callable[[IOCall], bool]:
    return lambda call: call.kind == kind and call.name == "slab"


async def assert_quiet(runtime: OffloadRuntime) -> None:
    """As `assert_at_rest`, once the disk has been told all that it is told while there is nothing else to do."""
    while runtime.statistics().num_jobs:
        await runtime.flush()
    await assert_at_rest(runtime)

"""Runtimes with a remote tier over a simulated store that they share, and real bytes."""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs
from serving import GUARD_S, Engine, TensorBlocks, assert_at_rest, config

from aoffload import DiskTier, OffloadRuntime, RemoteTier, Tier
from aoffload._config.tiers import ObjectStore
from aoffload.ledger import LowerTier
from aoffload.testing import SimulatedStore, StoreCall, StoreFault
from aoffload.transport import Env, LocalTransport, TransportTier

CELL_BYTES = 128
"""Two blocks of `TensorBlocks`."""
CELL_TOKENS = 8
SECRET = b"0123456789abcdef0123456789abcdef"
PATIENT = {"ask_timeout_s": 30.0, "load_timeout_s": 30.0, "store_timeout_s": 30.0}
"""A busy machine is not a slow store."""


@asynccontextmanager
async def with_remote(
    store: ObjectStore,
    num_blocks: int = 8,
    *,
    num_host_blocks: int = 32,
    secret: bytes | None = SECRET,
    tier: dict[str, Any] | None = None,
    disk: DiskTier | None = None,
    custom: TransportTier | None = None,
    logger: Any = None,
    env: Env | None = None,
    **options: Any,
) -> AsyncIterator[Engine]:
    """`num_blocks` usable device blocks, and a host with room for what is fetched. `custom`: the copies of a tier of
    the program's own."""
    blocks = TensorBlocks(num_blocks + 1)
    remote = RemoteTier(store, secret, **{"cell_bytes": CELL_BYTES, **PATIENT, **(tier or {})})
    namespace = options.pop("namespace", "test")
    options = {"prefill_tokens_per_s": 1e-3, "max_fetch_share": 0.5, **options}  # whatever it takes: a fetch is sooner
    made = attrs.evolve(config(num_host_blocks, disk=disk, remote=remote, **options), namespace=namespace)
    tiers = {} if custom is None else {Tier.CUSTOM: custom}
    extensions = [LowerTier(found.num_blocks) for found in tiers.values()]
    transport = LocalTransport(blocks.tensors, disk=disk, remote=remote, tiers=tiers)
    async with OffloadRuntime(made, transport=transport, logger=logger, env=env, extensions=extensions) as runtime:
        yield Engine(runtime, blocks, made.groups[0].block_size)


async def in_the_store(engine: Engine, *prompts: Sequence[int], **options: Any) -> None:
    """Serve each twice, and wait until the store has all its cells."""
    for token_ids in prompts:
        for _ in range(2):
            await engine.serve(token_ids, **options)
            await quiet(engine.runtime)


async def only_in_the_store(engine: Engine, *prompts: Sequence[int]) -> None:
    """And have device and host forget them."""
    await in_the_store(engine, *prompts)
    await forget_locally(engine)


async def forget_locally(engine: Engine) -> None:
    await engine.runtime.reset(Tier.HOST)
    await engine.runtime.reset(Tier.DEVICE)


async def quiet(runtime: OffloadRuntime) -> None:
    while runtime.statistics().num_jobs:
        await runtime.flush()


async def assert_quiet(runtime: OffloadRuntime) -> None:
    await quiet(runtime)
    await assert_at_rest(runtime)


@attrs.define(eq=False)
class Later(Env):
    """The clock of the tier's threads leaps at a word."""

    leapt_s: float = 0.0

    def now(self) -> float:
        return super().now() + self.leapt_s


class HangingStore:
    """Calls of a simulated store that hang until they are released."""

    def __init__(self, store: SimulatedStore, *kinds: str) -> None:
        self._go_on = threading.Event()
        self._begun: queue.SimpleQueue[StoreCall] = queue.SimpleQueue()
        store.fault = lambda call: StoreFault.SLOW if call.kind in kinds and not self._go_on.is_set() else None
        store.wait = self._wait

    def _wait(self, call: StoreCall) -> None:
        self._begun.put(call)
        assert self._go_on.wait(GUARD_S)

    async def wait_for(self, num_calls: int = 1) -> None:
        """Wait until so many more calls hang."""
        for _ in range(num_calls):
            await anyio.to_thread.run_sync(lambda: self._begun.get(timeout=GUARD_S))

    def resume(self) -> None:
        self._go_on.set()


def failing(*kinds: str, fault: StoreFault = StoreFault.ERROR) -> Callable[[StoreCall], StoreFault | None]:
    return lambda call: fault if call.kind in kinds else None

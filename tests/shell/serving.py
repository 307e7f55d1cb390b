"""Shared parts of the runtime tests: an engine whose KV is a function of the prefix, so that bytes can be checked."""

from __future__ import annotations

import hashlib
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import anyio
import attrs
import pytest
import torch
from scripted import ScriptedTransport

from aoffload import FullAttention, KVCacheGroup, OffloadConfig, OffloadRuntime, PendingLoad, Request
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.local import LocalTransport
from aoffload.ledger import AttentionKind

ASYNCIO = pytest.param(("asyncio", {}), id="asyncio")
UVLOOP = pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")
TRIO = pytest.param(("trio", {}), id="trio")
BACKENDS = [ASYNCIO, TRIO]
EVERY_BACKEND = [ASYNCIO, UVLOOP, TRIO]
"""Where a loop has its own say: how tasks are cancelled, opened, woken and scoped."""

Result = TypeVar("Result")

BLOCK = 4
GUARD_S = 60.0
"""Never waited for in full unless something hangs that must not."""


def config(
    num_host_blocks: int = 16, block_size: int = BLOCK, attention: AttentionKind | None = None, **options: Any
) -> OffloadConfig:
    group = KVCacheGroup("all", attention=attention or FullAttention(), block_size=block_size)
    return OffloadConfig(groups=[group], num_host_blocks=num_host_blocks, namespace="test", **options)


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids of which no prefix is shared with another seed."""
    return [seed * 100_000 + index for index in range(num_tokens)]


def tag(token_ids: Sequence[int], salt: object = None) -> int:
    """What KV of a block is made from: every token up to its end."""
    digest = hashlib.blake2b(repr((salt, tuple(token_ids))).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") + 1


class Blocks(Protocol):
    """The device blocks as a forward sees them."""

    def write(self, block_id: int, value: int) -> None: ...
    def read(self, block_id: int) -> int: ...


@attrs.define(eq=False)
class TensorBlocks:
    """Real bytes: a row of eight integers for each block, in two tensors."""

    num_blocks: int
    tensors: list[torch.Tensor] = attrs.field()

    @tensors.default
    def _make(self) -> list[torch.Tensor]:
        return [torch.zeros(self.num_blocks, 4, dtype=torch.int64) for _ in range(2)]

    def write(self, block_id: int, value: int) -> None:
        for tensor in self.tensors:
            tensor[block_id] = value

    def read(self, block_id: int) -> int:
        found = {int(value) for tensor in self.tensors for value in tensor[block_id]}
        return found.pop() if len(found) == 1 else -1


@attrs.define(eq=False)
class TagBlocks:
    """The tags of a scripted transport."""

    transport: ScriptedTransport

    def write(self, block_id: int, value: int) -> None:
        self.transport.device_content[block_id] = value

    def read(self, block_id: int) -> int:
        return self.transport.device_content[block_id]


@attrs.define(eq=False)
class Engine:
    """Computes KV and checks whatever it is told not to compute."""

    runtime: OffloadRuntime
    blocks: Blocks
    block_size: int = BLOCK
    num_checked: int = 0

    def check(self, request: Request, token_ids: Sequence[int], num_ready: int, salt: object = None) -> None:
        """Every ready block that attention still reads holds the bytes of exactly this prefix."""
        table = request.block_ids[0]
        attention = self.runtime.ledger.layout.groups[0].attention
        for index in attention.required_blocks(num_ready, self.block_size):
            expected = tag(token_ids[: (index + 1) * self.block_size], salt)
            found = self.blocks.read(table[index])
            assert found == expected, f"{request}: block {index} (id {table[index]}) holds other KV than its prefix's"
            self.num_checked += 1

    def compute(
        self, request: Request, token_ids: Sequence[int], num_ready: int, salt: object = None, stop: int | None = None
    ) -> None:
        """A forward: writes the whole blocks after what is ready."""
        table = request.block_ids[0]
        for index in range(num_ready // self.block_size, (stop or len(token_ids)) // self.block_size):
            self.blocks.write(table[index], tag(token_ids[: (index + 1) * self.block_size], salt))

    async def serve(self, token_ids: Sequence[int], *, salt: str | None = None, **options: Any) -> int:
        """One request from its match to its commit; the number of tokens that it found ready."""
        async with self.runtime.request(token_ids, cache_salt=salt, **options) as request:
            return await self.prefill(request, token_ids, salt)
        raise AssertionError("the request was cancelled")

    async def prefill(self, request: Request, token_ids: Sequence[int], salt: object = None) -> int:
        await request.allocate()
        num_ready = await request.load()
        self.check(request, token_ids, num_ready, salt)
        with self.runtime.step([request]):
            self.compute(request, token_ids, num_ready, salt)
        request.commit(len(token_ids))
        self.check(request, token_ids, len(token_ids), salt)
        return num_ready

    async def evict_device(self, seed: int = 900) -> None:
        """Make every unpinned device block another request's."""
        num_blocks = self.runtime.statistics().device.num_blocks
        async with self.runtime.request(prompt(seed, 1)) as request:
            await request.allocate(num_blocks * self.block_size)


async def on_the_host_only(engine: Engine, *prompts: list[int]) -> None:
    """Serve them, and have their device blocks taken by others."""
    for token_ids in prompts:
        await engine.serve(token_ids)
        await engine.runtime.flush()
        await engine.evict_device()


async def loading(request: Request, transport: ScriptedTransport) -> PendingLoad:
    """A load on its way, which ends when the test says so."""
    await request.allocate()
    transport.auto = False
    return request.load_nowait()


@asynccontextmanager
async def scripted(
    num_blocks: int = 16, *, auto: bool = True, logger: Any = None, **options: Any
) -> AsyncIterator[tuple[Engine, ScriptedTransport]]:
    """A runtime whose copies land as the test says; `num_blocks` usable device blocks."""
    transport = ScriptedTransport(num_blocks + 1, auto=auto)
    made = config(**options)
    async with OffloadRuntime(made, transport=transport, logger=logger) as runtime:
        yield Engine(runtime, TagBlocks(transport), made.groups[0].block_size), transport


@asynccontextmanager
async def with_bytes(
    num_blocks: int = 16, *, in_threads: bool = False, logger: Any = None, **options: Any
) -> AsyncIterator[Engine]:
    """A runtime over real tensors; `num_blocks` usable device blocks. `in_threads`: no copy is made at once."""
    blocks = TensorBlocks(num_blocks + 1)
    made = config(**options)
    transport = threaded(blocks.tensors) if in_threads else LocalTransport(blocks.tensors)
    async with OffloadRuntime(made, transport=transport, logger=logger) as runtime:
        yield Engine(runtime, blocks, made.groups[0].block_size)


class OwnBackend(CpuBackend):
    """A program's own backend: nobody knows whether its copies wait, so threads make them."""


def threaded(tensors: object) -> LocalTransport:
    """A transport that makes no copy at once."""
    return LocalTransport(tensors, OwnBackend)


def pinned(runtime: OffloadRuntime) -> tuple[int, int]:
    """Pinned blocks, on the device and on the host."""
    found = runtime.statistics()
    return found.device.num_pinned, found.host.num_pinned


async def assert_at_rest(runtime: OffloadRuntime) -> None:
    """Nobody is served and nothing is under way: nothing may be pinned, waiting or known of any more."""
    await runtime.flush()
    runtime.check_integrity()
    found = runtime.statistics()
    assert (found.num_requests, found.num_waiting, found.num_jobs) == (0, 0, 0), found
    assert pinned(runtime) == (0, 0), found
    assert not len(runtime._session.requests)


async def turns(count: int = 12) -> None:
    """Let everybody else run until nothing more can happen without us (a few turns of the loop, no clock)."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@attrs.define(eq=False)
class Checkpoints:
    """Runs a coroutine and does something at its k-th checkpoint, counted from 0.

    A checkpoint is where the coroutine hands control to the event loop, whichever loop that is. With `again`, it does
    the same at the one after: while the coroutine cleans up.
    """

    at: int
    act: Callable[[], object]
    again: bool = False
    count: int = 0

    @property
    def reached(self) -> bool:
        return self.count > self.at

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return await self._drive(coroutine)

    @types.coroutine
    def _drive(self, coroutine: Coroutine[Any, Any, Result]) -> Generator[Any, Any, Result]:
        send: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731
        while True:
            try:
                passed = send()
            except StopIteration as stop:
                result: Result = stop.value
                return result
            if self.count == self.at or (self.again and self.count == self.at + 1):
                self.act()
            self.count += 1
            try:
                value = yield passed
            except BaseException as error:  # noqa: BLE001 - thrown on, into the coroutine
                thrown = error
                send = lambda: coroutine.throw(thrown)  # noqa: E731, B023
            else:
                send = lambda: coroutine.send(value)  # noqa: E731, B023


async def at_every_checkpoint(scenario: Callable[[int], Awaitable[bool]], at_most: int = 200) -> int:
    """Run `scenario(k)` for k = 0, 1, ... until it says that it had no k-th checkpoint; how many it had."""
    for k in range(at_most):
        if not await scenario(k):
            return k
    raise AssertionError(f"still running after {at_most} checkpoints")

"""An async engine with a block pool and a prefix cache of its own, over blocks of tags."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs
from scripted import ScriptedTransport
from serving import BLOCK, config, tag

from aoffload import HostCacheRuntime
from aoffload.host_cache import EngineRequest

__all__ = ["OwnEngine", "OwnPool", "own_engine"]


class OwnPool:
    """Blocks with a reference count each. Free ones keep what they hold, and are found, until they are taken."""

    def __init__(self, num_rows: int) -> None:
        self.free, self.references = deque(range(1, num_rows)), Counter[int]()
        self.cached: dict[tuple[int, ...], int] = {}
        self.held: Counter[int] = Counter()
        """By copies."""

    def hold(self, block_ids: array[int]) -> None:
        self.held.update(block_ids)
        self.refer(block_ids)

    def give(self, block_ids: array[int]) -> None:
        self.held.subtract(block_ids)
        assert min(self.held.values(), default=0) >= 0, "given, and not held"
        self.release(block_ids)

    def refer(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if not self.references[block_id]:
                self.free.remove(block_id)
            self.references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.references[block_id] -= 1
            assert self.references[block_id] >= 0, "let go of, and nobody had it"
            if not self.references[block_id]:
                self.free.append(block_id)

    def take(self, num_blocks: int) -> list[int]:
        """`IndexError` if there are too few; nothing is taken then."""
        taken = [self.free[at] for at in range(num_blocks)]
        self.forget(taken)
        self.refer(taken)
        return taken

    def cache(self, token_ids: Sequence[int], table: Sequence[int]) -> None:
        for at in range(len(token_ids) // BLOCK):
            self.cached.setdefault(tuple(token_ids[: (at + 1) * BLOCK]), table[at])

    def forget(self, block_ids: Iterable[int]) -> None:
        for key in [key for key, block_id in self.cached.items() if block_id in block_ids]:
            del self.cached[key]

    def hit(self, token_ids: Sequence[int]) -> list[int]:
        """Referred to, for whoever asks."""
        found: list[int] = []
        for at in range((len(token_ids) - 1) // BLOCK):
            block_id = self.cached.get(tuple(token_ids[: (at + 1) * BLOCK]))
            if block_id is None:
                break
            found.append(block_id)
        self.refer(found)
        return found


@attrs.define(eq=False)
class OwnEngine:
    """Computes KV into blocks of its own, and checks every byte that it does not compute."""

    runtime: HostCacheRuntime
    transport: ScriptedTransport
    pool: OwnPool
    num_rows: int
    num_pending: int = 0
    tables: list[list[int]] = attrs.field(factory=list)
    """Of all requests so far."""
    asked: list[EngineRequest] = attrs.field(factory=list)

    async def serve(self, token_ids: Sequence[int], **options: Any) -> int:
        """A whole life; the number of tokens that were ready before anything was computed. -1: it was cancelled."""
        table = self.pool.hit(token_ids)
        self.tables.append(table)
        try:
            request = self.runtime.request(token_ids, num_device_tokens=len(table) * BLOCK, **options)
            self.asked.append(request)
            async with request:
                num_ready = await self.prepare(request, token_ids, table)
                self.compute(token_ids, table, num_ready)
                await anyio.lowlevel.checkpoint()
                request.offer(len(token_ids), [table], is_last=True)
                self.pool.cache(token_ids, table)
                return num_ready
            return -1
        finally:
            self.pool.release(reversed(table))

    async def prepare(self, request: EngineRequest, token_ids: Sequence[int], table: list[int]) -> int:
        """Wait for what others bring, load into fresh blocks, and have others in place of what has not come."""
        while request.match.is_pending:
            self.num_pending += 1
            self.pool.release(reversed(table))
            table[:] = self.pool.hit(token_ids)
            await request.match_again(num_device_tokens=len(table) * BLOCK)
        table += self.pool.take(-(-len(token_ids) // BLOCK) - len(table))
        num_ready = await request.load(into=[table])
        if num_ready < request.match.num_tokens:
            self.replace(table, num_ready // BLOCK)
        self.check(token_ids, table, num_ready)
        return num_ready

    def replace(self, table: list[int], start: int) -> None:
        """Have other blocks from position `start` on: copies may still write to these."""
        old = table[start:]
        table[start:] = self.pool.take(len(old))
        self.pool.release(reversed(old))

    def compute(self, token_ids: Sequence[int], table: Sequence[int], num_ready: int) -> None:
        for at in range(num_ready // BLOCK, len(token_ids) // BLOCK):
            self.transport.device_content[table[at]] = tag(token_ids[: (at + 1) * BLOCK])

    def check(self, token_ids: Sequence[int], table: Sequence[int], num_ready: int) -> None:
        for at in range(num_ready // BLOCK):
            found = self.transport.device_content[table[at]]
            assert found == tag(token_ids[: (at + 1) * BLOCK]), f"block {at} (id {table[at]}) holds other KV"

    async def stored(self, *prompts: list[int]) -> None:
        """Serve them; then only host memory has them."""
        for token_ids in prompts:
            await self.serve(token_ids)
            await self.runtime.flush()
        self.pool.cached.clear()

    def held(self) -> list[int]:
        return sorted(self.pool.held.elements())

    def in_flight(self) -> list[int]:
        return list(self.transport.in_flight)

    async def assert_stored_from(self, table: list[int], token_ids: list[int]) -> None:
        """The engine gives up `table`, and host memory has all of `token_ids` but the last."""
        self.pool.release(table)
        await self.runtime.flush()
        assert await self.serve(token_ids) == len(token_ids) - 1
        await self.assert_at_rest()

    async def assert_at_rest(self) -> None:
        """No request, no copy: every block is the engine's again, and nothing is pinned in host memory."""
        await self.runtime.flush()
        self.runtime.check_integrity()
        found = self.runtime.statistics()
        assert (found.num_requests, found.num_jobs, found.host.num_pinned, self.held()) == (0, 0, 0, [])
        assert sorted(self.pool.free) == list(range(1, self.num_rows)), "a block is lost, or free twice"
        assert not len(self.runtime._session.requests)


@asynccontextmanager
async def own_engine(
    num_blocks: int = 32, *, auto: bool = True, logger: Any = None, **options: Any
) -> AsyncIterator[OwnEngine]:
    """A runtime over a pool of the engine's, of `num_blocks` blocks; copies land as the test says."""
    transport, pool = ScriptedTransport(num_blocks + 1, auto=auto), OwnPool(num_blocks + 1)
    options.setdefault("num_host_blocks", 64)
    async with HostCacheRuntime(config(**options), transport=transport, engine_blocks=pool, logger=logger) as runtime:
        yield OwnEngine(runtime, transport, pool, num_blocks + 1)

"""Sequences of `tests/core/test_call_sequences.py` as tasks make them: right bytes, no leak, no wait without end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs
import pytest
from scripted import ScriptedTransport
from serving import ASYNCIO, TRIO, assert_at_rest, prompt, tag, turns

from aoffload import (
    FullAttention,
    KVCacheGroup,
    OffloadConfig,
    OffloadRuntime,
    OutOfBlocks,
    Request,
    RequestState,
    SlidingWindow,
    Tier,
)
from aoffload.ledger import Direction

pytestmark = pytest.mark.anyio

FULL = KVCacheGroup("full", FullAttention(), 1)
WINDOW = KVCacheGroup("window", SlidingWindow(3), 1)
A = prompt(1, 9)
WRONG = -1


@pytest.fixture(params=[ASYNCIO, TRIO])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@attrs.frozen
class Server:
    """Blocks of one token that hold tags: of the prefix that they end, or wrong."""

    runtime: OffloadRuntime
    transport: ScriptedTransport

    def forward(self, request: Request, tokens: Sequence[int], stop: int, *, failed: bool = False) -> None:
        """Computes up to `stop`, and commits that. What reads wrong bytes computes wrong ones."""
        is_wrong = failed or not self.reads_right(request, tokens)
        with self.runtime.step([request]):
            for group, table in enumerate(request.block_ids):
                for index in range(request.num_computed_tokens, stop):
                    value = WRONG if is_wrong else tag(tokens[: index + 1], group)
                    self.transport.device_content[table[index]] = value
        request.commit(stop)

    def reads_right(self, request: Request, tokens: Sequence[int]) -> bool:
        return all(found == right for found, right in self._reads(request, tokens))

    def _reads(self, request: Request, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        for number, group in enumerate(self.runtime.ledger.layout.groups):
            for index in group.attention.required_blocks(request.num_computed_tokens, 1):
                found = self.transport.device_content[request.block_ids[number][index]]
                yield found, tag(tokens[: index + 1], number)

    async def serve(self, tokens: Sequence[int]) -> None:
        async with self.runtime.request(tokens) as request:
            await request.allocate()
            await request.load()
            self.forward(request, tokens, len(tokens))
        await self.runtime.flush()

    async def forget_device(self) -> None:
        """What is cached is in host memory only, and what lay on the device is overwritten."""
        await self.runtime.reset(Tier.DEVICE)
        for block_id in range(self.transport.num_device_blocks):
            self.transport.device_content[block_id] = WRONG


@asynccontextmanager
async def served(num_blocks: int, *groups: KVCacheGroup) -> AsyncIterator[Server]:
    transport = ScriptedTransport(num_blocks + 1, auto=True)
    async with OffloadRuntime(OffloadConfig(groups=groups, num_host_blocks=64), transport=transport) as runtime:
        yield Server(runtime, transport)
        await assert_at_rest(runtime)
        for tier in (runtime.statistics().device, runtime.statistics().host):
            assert tier.num_free + tier.num_cached == tier.num_blocks


@pytest.mark.parametrize("waits", [False, True], ids=["refused", "given up"])
async def test_room_that_is_asked_for_before_the_load_and_not_had(waits: bool) -> None:
    """A request asks for more room than there is between `allocate` and `load`, and goes on without it: what is loaded
    is right, and every block comes back."""
    async with served(40, FULL, WINDOW) as server:
        await server.serve(A)
        await server.forget_device()
        async with server.runtime.request(A) as request:
            await request.allocate()
            async with server.runtime.request(A, reads_cache=False) as twin:
                await twin.allocate()
                await twin.load()
                server.forward(twin, A, 9)
                if waits:
                    async with anyio.create_task_group() as group:
                        group.start_soon(request.extend, 19)
                        await turns()
                        group.cancel_scope.cancel()
                else:
                    with pytest.raises(OutOfBlocks):
                        request.extend_nowait(19)
                server.runtime.check_integrity()
                assert await request.load() == 8
                assert server.reads_right(request, A)


async def test_nobody_finds_what_was_computed_on_a_failed_forward() -> None:
    """A model of windows alone: who has read invalidated KV is gone by then, and what it has cached is a miss."""
    async with served(40, WINDOW) as server:
        async with server.runtime.request(A) as author:
            await author.allocate()
            await author.load()
            server.forward(author, A, 3, failed=True)
            async with server.runtime.request(A) as reader:
                await reader.allocate()
                await reader.load()
                server.forward(reader, A, 9)
                server.forward(author, A, 6)
            author.invalidate(0)
            await anyio.lowlevel.checkpoint()
        assert (author.state, author.reason) == (RequestState.ABORTED, "prefix_invalidated")
        await server.runtime.flush()
        async with server.runtime.request(A) as later:
            await later.allocate()
            await later.load()
            assert server.reads_right(later, A)


async def test_the_device_is_reset_between_a_grant_and_the_turn_of_its_task() -> None:
    """A load is lost, its request waits for free blocks to compute and gets them when another leaves; in the same turn
    the device is reset. Its table is whole, and nothing in it is called ready that nobody has written."""
    tokens = A[:7]
    async with served(20, FULL) as server:
        await server.serve(tokens)
        await server.forget_device()
        server.transport.auto = False

        async def load() -> None:
            async with server.runtime.request(tokens) as request:
                await request.allocate()
                found.append(await request.load())
                assert server.reads_right(request, tokens)
                assert len(request.block_ids[0]) == len(tokens)
                server.runtime.check_integrity()

        found: list[int] = []
        async with anyio.create_task_group() as group:
            group.start_soon(load)
            await turns()
            (lost,) = server.transport.in_flight
            assert server.transport.in_flight[lost].plan.direction is Direction.LOAD
            other_tokens = [*tokens[:3], *prompt(2, 8)]
            async with server.runtime.request(other_tokens, reads_cache=False, store="none") as other:
                await other.allocate()
                await other.load()
                server.forward(other, other_tokens, 11)
                server.transport.lose(lost)
                await turns()
                assert not found
            await server.runtime.reset(Tier.DEVICE)
        assert found == [0]
        server.transport.fail(lost)
        await turns()


@pytest.mark.parametrize("pressure", range(1, 6))
async def test_a_task_gets_room_inside_of_its_own_pin(pressure: int) -> None:
    """Nobody else holds anything: the pin yields, whatever of it is left and the request has matched, and nobody waits
    for its time to be over."""
    async with served(10, FULL, WINDOW) as server:
        await server.serve(A[:3])
        async with server.runtime.request(prompt(5, 8)) as squeezing:
            await squeezing.allocate(pressure)
        with server.runtime.pins.hold(A[:1], ttl_s=3600):
            async with server.runtime.request([*A[:1], *prompt(6, 4)]) as request, anyio.create_task_group() as group:
                group.start_soon(request.allocate)
                await turns()
                assert request.state is RequestState.ALLOCATED

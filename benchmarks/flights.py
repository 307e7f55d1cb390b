"""A request through the runtime with others in flight, which are parked between two steps of decoding, or in progress
as well.

Blocks have 64 bytes and are really copied. Each measured request is a host hit of 256 tokens, and evicts another prompt
from the device. There is a runtime for each number of requests. They share one event loop and take turns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

import anyio
import torch
from anyio.abc import TaskGroup, TaskStatus

from aoffload import OffloadConfig, OffloadRuntime

from .cycle import BLOCK_SIZE, Tokens, prompts_of
from .harness import SAMPLE_S, Rounds, Sample
from .pools import ONE_GROUP, RUN_BLOCKS, prompt_of

__all__ = ["AllAtOnce", "Flight", "ParkedBeside", "measure_flights"]

FLOATS_PER_BLOCK = 16
NUM_CACHED = 200
"""Prompts in the host. They take turns, so the device must hold fewer."""
NUM_ROOM = 64
"""Requests of `AllAtOnce` that get blocks at once. The others wait in the queue."""


class Flight(Protocol):
    """A runtime, and requests through it."""

    runtime: OffloadRuntime

    async def prepare(self, tasks: TaskGroup) -> None: ...

    async def batch(self) -> int:
        """Serve some requests to their end. Returns their number."""
        ...


async def measure_flights(flights: Sequence[Flight], seconds: float, least: int) -> Rounds:
    """The samples of one request of each flight, by its place in `flights`."""
    async with AsyncExitStack() as stack:
        for flight in flights:
            await stack.enter_async_context(flight.runtime)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for flight in flights:
            await flight.prepare(tasks)
        rounds = Rounds([str(at) for at in range(len(flights))], seconds=seconds, least=least, warm_up=1)
        for name in rounds:
            rounds.add(name, await _sample(flights[int(name)]))
        tasks.cancel_scope.cancel()
    return rounds


async def _sample(flight: Flight) -> Sample:
    cpu, wall = time.thread_time(), time.perf_counter()
    number = await flight.batch()
    while (took := time.perf_counter() - wall) < SAMPLE_S:
        number += await flight.batch()
    return Sample(took / number, (time.thread_time() - cpu) / number)


class _Prompts:
    """A runtime with `num_device` device blocks, and prompts in its host memory that take turns."""

    def __init__(self, num_device: int, num_cached: int) -> None:
        config = OffloadConfig(groups=ONE_GROUP, num_host_blocks=num_cached * RUN_BLOCKS)
        self.runtime = OffloadRuntime(config, torch.zeros(num_device + 1, FLOATS_PER_BLOCK))
        self.template = prompts_of(RUN_BLOCKS, 1)[0]
        self.num_cached = num_cached
        self._turns = itertools.cycle(range(num_cached))

    async def fill(self) -> None:
        for _ in range(self.num_cached):
            await self.serve(is_cached=False)
        await self.runtime.flush()

    async def serve(self, is_cached: bool = True) -> None:
        tokens = prompt_of(next(self._turns), self.template)
        async with self.runtime.request(tokens) as request:
            assert request.match.num_host_tokens == is_cached * RUN_BLOCKS * BLOCK_SIZE, request.match
            await request.allocate()
            await request.load()
            request.commit(len(tokens))


class ParkedBeside(_Prompts):
    """One request after the other, beside `number - 1` that stay in flight."""

    def __init__(self, number: int, num_cached: int = NUM_CACHED) -> None:
        self._num_parked = number - 1
        super().__init__((self._num_parked + num_cached - 1) * RUN_BLOCKS + 1, num_cached)

    async def prepare(self, tasks: TaskGroup) -> None:
        for number in range(self._num_parked):
            await tasks.start(self._stay, prompt_of(self.num_cached + number, self.template[:-BLOCK_SIZE]))
        await self.fill()
        statistics = self.runtime.statistics()
        assert (statistics.num_requests, statistics.device.num_free) == (self._num_parked, 1), statistics

    async def _stay(self, tokens: Tokens, *, task_status: TaskStatus[None]) -> None:
        async with self.runtime.request(tokens, store="none") as request:
            await request.allocate()
            request.commit(len(tokens))
            task_status.started()
            await anyio.Event().wait()

    async def batch(self) -> int:
        await self.serve()
        return 1


class AllAtOnce(_Prompts):
    """`number` requests that begin at once, a task for each. The device has blocks for `NUM_ROOM` of them."""

    def __init__(self, number: int) -> None:
        self._number = number
        super().__init__(NUM_ROOM * (RUN_BLOCKS + 1), NUM_CACHED)

    async def prepare(self, tasks: TaskGroup) -> None:
        await self.fill()

    async def batch(self) -> int:
        async with anyio.create_task_group() as clients:
            for _ in range(self._number):
                clients.start_soon(self.serve)
        return self._number

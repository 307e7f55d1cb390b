"""`run_step`: the blocks of a forward belong to its thread, whatever becomes of the task that waits for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import pytest
import torch
from serving import BACKENDS, GUARD_S, config, prompt

from aoffload import OffloadRuntime, RequestState, WrongState

NUM_BLOCKS = 9


def kv_cache() -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, 4)


class Forward:
    """A forward that lasts until it is told to end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.has_begun = threading.Event()

    def __call__(self) -> int:
        self.has_begun.set()
        assert self.may_end.wait(GUARD_S)
        return 42

    async def begun(self) -> None:
        while not self.has_begun.is_set():
            await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS)
async def test_it_returns_what_the_forward_returned(anyio_backend: Any) -> None:
    """The result comes back, an exception too, and the step is over when the call is."""
    async with OffloadRuntime(config(), kv_cache()) as runtime:
        async with runtime.request(prompt(1, 8)) as request:
            await request.allocate()
            await request.load()
            assert await runtime.run_step([request], lambda: 42) == 42
            with pytest.raises(ZeroDivisionError):
                await runtime.run_step([request], lambda: 1 // 0)
            request.commit(8)
        await runtime.flush()
        assert runtime.statistics().device.num_pinned == 0
        runtime.check_integrity()


@pytest.mark.asyncio
async def test_a_native_cancel_leaves_the_blocks_with_the_thread() -> None:
    """asyncio's own `Task.cancel` ends the request at once; its blocks are free only when its forward is through."""
    async with OffloadRuntime(config(), kv_cache()) as runtime:
        forward = Forward()

        async def serve() -> None:
            async with runtime.request(prompt(1, 8), "leaver") as request:
                await request.allocate()
                await request.load()
                await runtime.run_step([request], forward)

        task = asyncio.create_task(serve())
        await forward.begun()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runtime.statistics().num_requests == 0
        assert runtime.statistics().device.num_pinned == 2, "the thread still writes into these"
        forward.may_end.set()
        with anyio.fail_after(GUARD_S):
            while runtime.statistics().device.num_pinned:
                await anyio.lowlevel.checkpoint()
        runtime.check_integrity()


@pytest.mark.asyncio
async def test_cancelled_before_the_thread_began() -> None:
    """A forward that never began holds nothing, and is never run afterwards."""
    async with OffloadRuntime(config(), kv_cache()) as runtime:
        ran: list[int] = []

        async def serve() -> None:
            async with runtime.request(prompt(1, 8)) as request:
                await request.allocate()
                await request.load()
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await runtime.run_step([request], lambda: ran.append(1))

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(serve())
        assert not ran
        assert runtime.statistics().device.num_pinned == 0
        runtime.check_integrity()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS)
async def test_it_takes_only_requests_that_have_blocks(anyio_backend: Any) -> None:
    """A request without blocks is refused by name, and nothing is held for the others."""
    async with OffloadRuntime(config(), kv_cache()) as runtime:
        async with runtime.request(prompt(1, 8)) as ready, runtime.request(prompt(2, 8)) as unready:
            await ready.allocate()
            with pytest.raises(WrongState, match="step"):
                await runtime.run_step([ready, unready], lambda: None)
            assert unready.state is RequestState.PINNED
        assert runtime.statistics().device.num_pinned == 0

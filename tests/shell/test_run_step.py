"""`run_step`: the blocks of a forward belong to its thread, whatever becomes of the task that waits for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import pytest
import torch
from serving import BACKENDS, GUARD_S, config, prompt

from aoffload import CommitError, Computed, InvalidArgument, OffloadRuntime, RequestState, WrongState

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


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS)
async def test_nobody_preempts_between_the_step_and_its_commit(anyio_backend: Any) -> None:
    """A task that waits to preempt gets the request once its task has gone on: what the forward computed is committed,
    and right when it is read again."""
    async with OffloadRuntime(config(), kv_cache()) as runtime, anyio.create_task_group() as group:
        async with runtime.request(prompt(1, 8)) as request:
            await request.allocate()
            await request.load()
            states: list[RequestState] = []
            forward = Forward()

            async def preempt() -> None:
                await forward.begun()
                group.start_soon(end)
                await request.preempt()
                states.append(request.state)

            async def end() -> None:
                forward.may_end.set()

            group.start_soon(preempt)
            await runtime.run_step([request], forward)
            states.append(request.state)
            request.commit(8)
            while len(states) < 2:
                await anyio.lowlevel.checkpoint()
            assert states == [RequestState.RUNNING, RequestState.PREEMPTED]
            assert await request.resume() == 4  # the last token is always computed, and its block


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS)
async def test_what_a_preempted_step_computed_is_never_published(anyio_backend: Any) -> None:
    """Not when the request has blocks again, other ones: `commit` refuses it until a new step has computed, and
    `commit_step` leaves it out and says so, in whatever state it is."""
    async with OffloadRuntime(config(), kv_cache()) as runtime:
        async with runtime.request(prompt(1, 8)) as request, runtime.request(prompt(2, 8)) as other:
            for each in (request, other):
                await each.allocate()
                await each.load()
            with runtime.step([request, other]):
                pass
            request.preempt_nowait()
            both = [Computed(request, 8), Computed(other, 8)]
            assert runtime.commit_step(both) == (request,)
            await request.resume()
            with pytest.raises(CommitError, match="given up its blocks since its last step"):
                request.commit(8)
            assert runtime.commit_step([Computed(request, 8)]) == (request,)
            assert runtime.lookup(prompt(1, 9)).num_device_tokens == 0
            await runtime.run_step([request], lambda: None)
            assert runtime.commit_step(both[:1]) == ()
            assert runtime.lookup(prompt(1, 9)).num_device_tokens == 8


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS)
async def test_two_tasks_preempt_the_same_victim(anyio_backend: Any) -> None:
    """Both wait for its step: one of them gets the blocks, the other none, and neither an error."""
    async with OffloadRuntime(config(), kv_cache()) as runtime, anyio.create_task_group() as group:
        async with runtime.request(prompt(1, 8)) as request:
            await request.allocate()
            await request.load()
            freed: list[int] = []

            async def preempt() -> None:
                freed.append((await request.preempt()).num_freed)

            with runtime.step([request]):
                for _ in range(2):
                    group.start_soon(preempt)
                for _ in range(9):
                    await anyio.lowlevel.checkpoint()
                assert not freed
            while len(freed) < 2:
                await anyio.lowlevel.checkpoint()
            assert sorted(freed) == [0, 2]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", BACKENDS)
async def test_an_async_function_is_no_forward(anyio_backend: Any) -> None:
    """Nothing would be computed in the step."""

    async def forward() -> None:
        raise AssertionError("not called")

    async with OffloadRuntime(config(), kv_cache()) as runtime:
        async with runtime.request(prompt(1, 8)) as request:
            await request.allocate()
            await request.load()
            with pytest.raises(InvalidArgument, match="function"):
                await runtime.run_step([request], forward)

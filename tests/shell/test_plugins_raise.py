"""Store policies and load choices that raise: the request ends, and other requests go on."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from serving import ASYNCIO, TRIO, assert_at_rest, config, prompt

from aoffload import Computed, EagerStore, HostCacheRuntime, OffloadRuntime, RequestState
from aoffload._kernel.records import LedgerRequest

pytestmark = pytest.mark.anyio

A, B = prompt(1, 8), prompt(2, 8)


@pytest.fixture(params=[ASYNCIO, TRIO])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Raises(EagerStore):
    """Raises when it is asked about the request `of`."""

    def __init__(self) -> None:
        self.of: str | None = None

    def wanted_stop(self, request: LedgerRequest) -> int:
        if request.request_id == self.of:
            raise ZeroDivisionError
        return request.published


def opened(policy: Raises) -> OffloadRuntime:
    return OffloadRuntime(config(store_policy=policy), torch.zeros(33, 16))


async def test_a_policy_that_raises_at_the_end_leaves_the_scopes_of_the_task_whole() -> None:
    """The request is over, the caller gets the error, and the scope of the request is left."""
    policy = Raises()
    async with opened(policy) as runtime:
        request = runtime.request(A, "a")

        async def serve() -> None:
            async with request:
                await request.allocate()
                await request.load()
                request.commit(8)
                policy.of = "a"

        with anyio.CancelScope():  # leaving it raises if the scope of the request is still entered
            with pytest.raises(ZeroDivisionError):
                await serve()
            assert request.state is RequestState.DONE
        await assert_at_rest(runtime)


async def test_a_policy_that_raises_where_nobody_listens_turns_nothing_off() -> None:
    """A block that is left in another thread has no caller to raise in; the cache goes on for the others."""
    policy = Raises()
    async with opened(policy) as runtime:
        request = runtime.request(A, "a")
        await request.__aenter__()
        await request.allocate()
        await request.load()
        request.commit(8)
        policy.of = "a"

        def leave() -> None:
            with pytest.warns(ResourceWarning, match="another thread"), pytest.raises(StopIteration):
                request.__aexit__(None, None, None).send(None)

        await anyio.to_thread.run_sync(leave)
        while request.state is not RequestState.DONE:
            await anyio.lowlevel.checkpoint()
        assert runtime.statistics().off_reason == ""
        request._scope.__exit__(None, None, None)  # type: ignore[union-attr]
        await assert_at_rest(runtime)


async def test_a_step_is_committed_whole_or_not_at_all_if_the_policy_raises() -> None:
    """`commit_step` may be repeated after the error: no token is appended twice, and hits are of the right tokens."""
    policy = Raises()
    async with opened(policy) as runtime, runtime.request(A, "a") as a, runtime.request(B, "b") as b:
        for request in (a, b):
            await request.allocate(20)
            await request.load()
        step, policy.of = [Computed(a, 8, [50]), Computed(b, 8, [60])], "b"
        with pytest.raises(ZeroDivisionError):
            runtime.commit_step(step)
        assert (a.num_computed_tokens, b.num_computed_tokens) == (0, 0)
        policy.of = None
        runtime.commit_step(step)
        runtime.commit_step([Computed(a, 12, [51, 52, 53])])
        assert runtime.lookup([*A, 50, 51, 52, 53, 0]).num_tokens == 12
        assert runtime.lookup([*A, 50, 50, 51, 52, 0]).num_tokens == 8


async def test_a_pin_that_is_left_twice_in_a_thread_turns_nothing_off() -> None:
    """The second leave of a pin does nothing, as that of a step."""
    async with opened(Raises()) as runtime:
        pin = runtime.pins.hold(A, 10.0)
        pin.__enter__()
        for _ in range(2):
            thread = threading.Thread(target=pin.__exit__, args=(None, None, None))
            thread.start()
            await anyio.to_thread.run_sync(thread.join)
        await anyio.lowlevel.checkpoint()
        await runtime.flush()
        assert runtime.statistics().off_reason == ""


class Pool:
    """Blocks of an engine that never frees any."""

    def hold(self, block_ids: Any) -> None: ...
    def give(self, block_ids: Any) -> None: ...


class Choice:
    is_broken = False

    def stop(self, offer: Any) -> int:
        if self.is_broken:
            raise ZeroDivisionError
        return offer.num_units  # type: ignore[no-any-return]


async def test_a_load_choice_that_raises_on_entering_leaves_no_request() -> None:
    """With `engine_blocks` the choice is made on entering. If it raises, nothing is entered, pinned or named."""
    choice, table = Choice(), [[1, 2, 3, 4, 5]]
    taken = config(load_choice=choice)
    async with HostCacheRuntime(taken, torch.zeros(20, 16), engine_blocks=Pool()) as runtime:
        runtime.report_compute(1000, 1.0)
        tokens = prompt(3, 20)
        async with runtime.request(tokens, "a", num_device_tokens=0) as request:
            await request.load(into=table)
            request.offer(20, table, is_last=True)
        await runtime.flush()
        choice.is_broken = True
        with pytest.raises(ZeroDivisionError):
            await runtime.request(tokens, "b", num_device_tokens=0).__aenter__()
        assert (runtime.statistics().host.num_pinned, runtime.statistics().num_requests) == (0, 0)
        choice.is_broken = False
        async with runtime.request(tokens, "b", num_device_tokens=0):
            pass

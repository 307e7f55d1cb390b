"""A runtime connects to its remote store while it opens: neither a first request waits for that, nor does a store that
is not there keep a runtime from opening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from clocks import leap, leaping_backend
from serving import GUARD_S, prompt, turns

pytest.importorskip("xxhash", reason="the extra `remote` is not installed")
pytest.importorskip("cryptography", reason="the extra `remote` is not installed")

from remote_serving import HangingStore, Later, assert_quiet, failing, forget_locally, in_the_store, with_remote

from aoffload._kernel.states import Direction
from aoffload._transfer.breaker import Use
from aoffload.stores import StoreError
from aoffload.testing import SimulatedStore

pytestmark = pytest.mark.anyio

A = prompt(1, 17)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


class Connects(SimulatedStore):
    """What `store` holds, for a process that is not connected yet. Connecting takes 25 seconds, and does not end in a
    call that may take less."""

    def __init__(self, store: SimulatedStore) -> None:
        super().__init__()
        self.objects = store.objects
        self.is_connected = False

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        if not self.is_connected and timeout_s < 25.0:
            raise StoreError("it has not connected in time")
        self.is_connected = True
        return super().exist(keys, timeout_s)


async def test_the_first_request_of_a_process_hits() -> None:
    """Also where connecting takes longer than a question may: the store has connected before the runtime is open."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        await in_the_store(engine, A)
    fresh = Connects(store)
    async with with_remote(fresh, tier={"ask_timeout_s": 20.0, "load_timeout_s": 30.0}) as engine:
        assert fresh.is_connected
        assert await engine.serve(A) == 16
        await assert_quiet(engine.runtime)


async def test_a_store_that_is_down_is_left_alone_from_the_start_and_comes_back() -> None:
    """Opening does not fail. The first request computes without asking, and once the store is back, requests hit."""
    store, env = SimulatedStore(), Later()
    async with with_remote(store) as engine:
        await in_the_store(engine, A)
    store.fault = failing("exist", "get", "put", "remove")
    async with with_remote(store, env=env) as engine:
        statistics = engine.runtime.statistics().remote_transfers
        assert statistics is not None
        (left,) = statistics.left_alone
        assert (left.use, left.num_failures) == (Use.ASK, 2)
        num_calls = store.num_calls
        assert await engine.serve(A, store="none") == 0 and store.num_calls == num_calls
        assert engine.runtime.statistics().num_fetches_skipped == 1
        store.fault = failing()
        env.leapt_s += 0.6
        await forget_locally(engine)
        assert await engine.serve(A) == 16


async def test_a_store_that_hangs_keeps_a_runtime_from_opening_for_a_bounded_time() -> None:
    """For `load_timeout_s`. Then requests compute."""
    store = SimulatedStore()
    hanging, is_open = HangingStore(store, "exist"), anyio.Event()

    async def serve() -> None:
        async with with_remote(store, tier={"load_timeout_s": 100.0, "ask_timeout_s": 50.0}, env=env) as engine:
            is_open.set()
            assert await engine.serve(A) == 0
            assert engine.runtime.transport.remote.refuses(Direction.LOAD)  # type: ignore[attr-defined]
            hanging.resume()

    env = Later()
    try:
        with anyio.fail_after(GUARD_S + 101.0):
            async with anyio.create_task_group() as group:
                group.start_soon(serve)
                await hanging.wait_for(2)
                leap(90.0)
                await turns(20)
                assert not is_open.is_set()
                env.leapt_s += 101.0
                leap(11.0)
                await is_open.wait()
    finally:
        hanging.resume()


async def test_a_runtime_whose_opening_is_cancelled_while_it_connects_leaves_nothing() -> None:
    """Its threads end, and the store is closed."""
    store = SimulatedStore()
    hanging = HangingStore(store, "exist")
    try:
        async with anyio.create_task_group() as group:

            async def serve() -> None:
                async with with_remote(store):
                    raise AssertionError("it was cancelled before")

            group.start_soon(serve)
            await hanging.wait_for(2)
            group.cancel_scope.cancel()
            hanging.resume()
    finally:
        hanging.resume()
    assert store.is_closed

"""Invalidation of KV that a remote store has, also during a reset or while a runtime closes."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from clocks import leaping_backend
from serving import GUARD_S, Engine, prompt, turns

pytest.importorskip("xxhash", reason="the extra `remote` is not installed")
pytest.importorskip("cryptography", reason="the extra `remote` is not installed")

from hanging_calls import serving_until
from remote_serving import (
    HangingStore,
    Later,
    assert_quiet,
    failing,
    forget_locally,
    only_in_the_store,
    quiet,
    with_remote,
)

from aoffload._kernel.states import Direction
from aoffload._runtime.request import Request
from aoffload._tiers.remote.lanes import LaneRemote
from aoffload.testing import SimulatedStore, StoreFault

pytestmark = pytest.mark.anyio

A, B = (prompt(seed, 17) for seed in range(1, 3))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


async def emptied(store: SimulatedStore) -> None:
    with anyio.fail_after(GUARD_S):
        while store.objects:
            await turns(1)


async def commit_wrong_kv(engine: Engine, request: Request) -> None:
    """Commit the bytes of another prompt, and ask for them a second time."""
    await request.allocate()
    await request.load()
    engine.compute(request, B, 0)
    request.commit(len(A))
    async with engine.runtime.request(A) as second:
        await second.allocate()
        await second.load()
        second.commit(len(A))


async def test_a_store_that_ends_while_the_runtime_closes_leaves_nothing_wrong() -> None:
    """The KV is invalidated while it is written, and the runtime closes before that is over: it is removed."""
    store = SimulatedStore()
    hanging = HangingStore(store, "put")
    try:
        async with anyio.create_task_group() as group, with_remote(store) as engine:
            async with engine.runtime.request(A) as request:
                await commit_wrong_kv(engine, request)
                await hanging.wait_for()
                request.invalidate(0)
            group.start_soon(_let_go_when_closed, engine, hanging)
    finally:
        hanging.resume()
    assert store.num_puts == 2
    await emptied(store)


async def _let_go_when_closed(engine: Engine, hanging: HangingStore) -> None:
    with anyio.fail_after(GUARD_S):
        while engine.runtime._session.is_open:
            await turns(1)
    hanging.resume()


async def test_a_put_that_has_failed_and_arrives_late_is_no_hit() -> None:
    """The put of wrong KV times out, the KV is invalidated, the store confirms its removal, and then the put arrives.
    Requests of this process compute, and hit what is right once it is stored again."""
    store, env = SimulatedStore(), Later()
    async with with_remote(store, env=env) as engine:
        async with engine.runtime.request(A) as request:
            store.fault = failing("put", fault=StoreFault.LATER)
            await commit_wrong_kv(engine, request)
            await quiet(engine.runtime)
            assert not store.objects
            store.fault = failing()
            request.invalidate(0)
        env.leapt_s += 10.0  # the store is left alone no longer
        await num_removed(engine, 2)
        store.arrive()
        assert len(store.objects) == 2
        env.leapt_s += 2.0  # that the store lacks them is not remembered so long
        await forget_locally(engine)
        assert await engine.serve(A) == 0
        assert engine.runtime.statistics().remote_transfers.cells_corrupt  # type: ignore[union-attr]
        await num_removed(engine, 3)
        await assert_quiet(engine.runtime)


async def num_removed(engine: Engine, num_cells: int) -> None:
    with anyio.fail_after(GUARD_S):
        while True:
            statistics = engine.runtime.statistics().remote_transfers
            assert statistics is not None
            if statistics.cells_removed >= num_cells:
                return
            await turns(1)


async def test_what_is_wrong_is_removed_after_a_reset_too() -> None:
    """The runtime uses the store no more. Others do."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        async with engine.runtime.request(A) as request:
            await commit_wrong_kv(engine, request)
            await quiet(engine.runtime)
            assert len(store.objects) == 2
            await engine.runtime.reset()
            request.invalidate(0)
        await emptied(store)
        await assert_quiet(engine.runtime)


async def test_a_removal_that_fails_after_a_reset_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime uses the store no more. Whenever it does anything else, threads look for what is to be removed."""
    looks: list[Direction] = []
    right = LaneRemote.refuses

    def refuses(self: LaneRemote, direction: Direction) -> bool:
        looks.append(direction)
        return right(self, direction)

    async with with_remote(SimulatedStore()) as engine:
        await engine.runtime.reset()
        monkeypatch.setattr(LaneRemote, "refuses", refuses)
        await engine.serve(B)
        assert Direction.STORE in looks
        await assert_quiet(engine.runtime)


async def test_an_answer_that_comes_after_a_reset_is_of_before() -> None:
    """A request that waited for it computes, and none hits KV from before the reset."""
    store = SimulatedStore()
    async with with_remote(store, tier={"ask_timeout_s": 100.0}) as engine:
        await only_in_the_store(engine, A)
        async with serving_until(HangingStore(store, "exist"), engine, A) as found:
            await engine.runtime.reset()
        assert found == [0]
        assert engine.runtime.lookup(A).num_tokens == 0
        statistics = engine.runtime.statistics().remote_transfers
        assert statistics is not None and not statistics.num_loads
        await assert_quiet(engine.runtime)

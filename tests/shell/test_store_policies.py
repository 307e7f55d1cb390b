"""Store policies in the runtime: copies are launched in the background, after the right fence."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from serving import BACKENDS, Engine, assert_at_rest, pinned, prompt, scripted, with_bytes

from aoffload import InvalidArgument, LazyStore, SelectiveStore
from aoffload._kernel.states import Direction
from aoffload.ledger import StoreScope
from aoffload.transport import PassedFence

pytestmark = pytest.mark.anyio

A, B, C, D = (prompt(seed, 17) for seed in range(1, 5))
"""Four blocks and one more token each."""
POLICIES: list[Any] = ["eager", LazyStore(8), SelectiveStore(min_seen=1)]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=["eager", "lazy", "selective"])


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_lazy_stores_land_before_their_blocks_are_needed() -> None:
    """More conversations than the device holds: nothing is stored while there is room, later all that was evicted
    comes back with its bytes."""
    async with with_bytes(13, num_host_blocks=40, store_policy=LazyStore(5)) as engine:
        await engine.serve(A)
        await engine.runtime.flush()
        assert engine.runtime.statistics().transfers.num_stores == 0
        for tokens in (B, C, D):
            await engine.serve(tokens)
            await engine.runtime.flush()
        assert await engine.serve(A) == 16
        assert await engine.serve(B) == 16
        found = engine.runtime.statistics().transfers
        assert (found.blocks_loaded, found.blocks_corrupt) == (8, 0)
        assert engine.num_checked > 8
        await assert_at_rest(engine.runtime)


async def test_a_lazy_store_waits_for_no_fence_of_somebody_else() -> None:
    """What is about to be evicted was computed by anybody: the copy gets no `after` of the request that happens to
    commit, so the transport makes it wait for all compute so far."""
    async with scripted(9, store_policy=LazyStore(6), auto=False) as (engine, transport):
        await engine.serve(A)
        async with engine.runtime.request(B) as request:
            await request.allocate()
            await request.load()
            with engine.runtime.step([request]):
                engine.compute(request, B, 0)
            request.commit(len(B), after=PassedFence())
            (launched,) = transport.launched
            assert launched.plan.direction is Direction.STORE
            assert launched.after is None
            transport.auto = True  # what else is stored until the runtime is closed
            transport.land_all()


async def test_a_lazy_store_outlives_the_request_that_made_room_scarce() -> None:
    """It is nobody's: who leaves discards nothing, and what it pins goes when it lands."""
    async with scripted(9, store_policy=LazyStore(5), auto=False) as (engine, transport):
        await engine.serve(A)
        await engine.serve(B)
        assert pinned(engine.runtime)[0] == 4
        transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_nothing_is_stored_because_the_runtime_closes() -> None:
    """What live requests release at the end is about to be lost, and of no use to anybody."""
    computed, closed = anyio.Event(), anyio.Event()

    async def hold(engine: Engine) -> None:
        async with engine.runtime.request(A) as request:
            await engine.prefill(request, A)
            computed.set()
            await closed.wait()

    async with anyio.create_task_group() as group:
        async with scripted(9, store_policy=LazyStore(9)) as (engine, transport):
            group.start_soon(hold, engine)
            await computed.wait()
        closed.set()
    assert transport.launched == []


@every_policy
@pytest.mark.parametrize(
    ("options", "num_stored"),
    [
        ({}, 4),
        ({"store": "prompt"}, 4),
        ({"store": StoreScope.NONE}, 0),
        ({"max_store_tokens": 9}, 2),
        ({"reads_cache": False}, 4),
    ],
    ids=str,
)
async def test_what_of_a_request_is_stored(policy: Any, options: dict[str, Any], num_stored: int) -> None:
    """From the call of the engine to the bytes in the host."""
    async with with_bytes(8, store_policy=policy) as engine:
        await engine.serve(A, **options)
        await engine.runtime.flush()
        assert engine.runtime.statistics().transfers.blocks_stored == num_stored
        await engine.evict_device()
        assert engine.runtime.lookup(A).num_host_tokens == num_stored * 4
        assert await engine.serve(A, **options) == (num_stored * 4 if options.get("reads_cache", True) else 0)
        await assert_at_rest(engine.runtime)


async def test_generated_tokens_stay_where_only_the_prompt_may_be_stored() -> None:
    """On the device they are cached as ever."""
    async with with_bytes(12) as engine:
        async with engine.runtime.request(A, store="prompt") as request:
            await engine.prefill(request, A)
            await request.extend(25)
            with engine.runtime.step([request]):
                engine.compute(request, [*A, *range(8)], 17)
            request.commit(25, range(8))
        await engine.runtime.flush()
        assert engine.runtime.lookup([*A, *range(8)]).num_device_tokens == 24
        assert engine.runtime.statistics().transfers.blocks_stored == 4


@pytest.mark.parametrize(
    ("argument", "value"), [("store", "some"), ("store", None), ("reads_cache", 1), ("max_store_tokens", -1)]
)
async def test_bad_wishes_are_refused_by_name(argument: str, value: object) -> None:
    """When the request is entered, and nothing is left of it."""
    async with scripted(8) as (engine, _):
        with pytest.raises(InvalidArgument) as refusal:
            async with engine.runtime.request(A, **{argument: value}):  # type: ignore[arg-type]
                raise AssertionError("entered")
        assert refusal.value.argument == argument
        await assert_at_rest(engine.runtime)

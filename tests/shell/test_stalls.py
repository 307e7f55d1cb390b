"""Copies that never end: waits, time-outs, quarantine, and recovery. In virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from clocks import JUMPING, jumping_backend
from serving import assert_at_rest, on_the_host_only, pinned, prompt, scripted, turns

from aoffload import OutOfBlocks, Request, RequestState, RuntimeClosed
from aoffload._kernel.states import Direction

pytestmark = pytest.mark.anyio

A, B, C = (prompt(seed, 9) for seed in range(1, 4))
TIMES: dict[str, Any] = {
    "load_timeout_s": 30.0,
    "transfer_timeout_s": 120.0,
    "store_timeout_s": 120.0,
    "close_timeout_s": 10.0,
}


@pytest.fixture(params=JUMPING)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return jumping_backend(request.param)


async def test_a_load_that_hangs() -> None:
    """A request waits `load_timeout_s` for it and computes; after `transfer_timeout_s` its blocks are quarantined.

    Until then nobody is given them, from then on nothing more is launched; a late end gives both back.
    """
    async with scripted(**TIMES) as (engine, transport):
        runtime = engine.runtime
        await on_the_host_only(engine, A, B)
        began = anyio.current_time()
        transport.auto = False
        assert await engine.serve(A) == 0
        assert anyio.current_time() - began == pytest.approx(30)
        (load,) = transport.in_flight
        assert transport.in_flight[load].plan.direction is Direction.LOAD
        runtime.check_integrity()
        assert runtime.statistics().num_jobs == 1
        assert pinned(runtime) == (4, 2)  # its destination, the path it would publish on (computed by now), its source
        assert runtime.statistics().device.num_quarantined == 0

        await anyio.sleep_until(began + 119)
        assert runtime.statistics().device.num_quarantined == 0
        await anyio.sleep_until(began + 121)
        assert runtime.statistics().device.num_quarantined == 2
        assert pinned(runtime) == (0, 0)  # a stray reader harms nobody: the source is free
        runtime.check_integrity()

        transport.auto = True
        launched = len(transport.launched)
        before = anyio.current_time()
        assert await engine.serve(B) == 0
        assert await engine.serve(C) == 0
        since = [one.plan.direction for one in transport.launched[launched:]]
        assert since == [Direction.STORE]  # of C: stores go another way, which is not stalled
        assert anyio.current_time() == before  # a stalled transport makes misses, not queues

        transport.land(load)
        await turns()
        assert runtime.statistics().device.num_quarantined == 0
        runtime.check_integrity()
        await on_the_host_only(engine, C)
        assert await engine.serve(C) == 8
        await assert_at_rest(runtime)


async def test_a_store_that_hangs() -> None:
    """A store without an end costs its host blocks; requests don't notice; `flush` waits no longer than the bound."""
    async with scripted(num_host_blocks=4, **TIMES) as (engine, transport):
        transport.auto = False
        began = anyio.current_time()
        assert await engine.serve(A) == 0
        await engine.runtime.flush()
        assert anyio.current_time() - began == pytest.approx(120)
        found = engine.runtime.statistics()
        assert (found.host.num_quarantined, found.num_jobs, *pinned(engine.runtime)) == (2, 0, 0, 0)
        assert await engine.serve(A) == 8
        engine.runtime.check_integrity()
        (job_id,) = transport.in_flight
        transport.fail(job_id)
        await turns()
        assert engine.runtime.statistics().host.num_free == 4
        transport.auto = True
        await on_the_host_only(engine, A)  # offered again
        assert await engine.serve(A) == 8
        await assert_at_rest(engine.runtime)


async def test_each_copy_has_its_own_deadline() -> None:
    """A copy is given up `transfer_timeout_s` after its own launch, whether the one before it ended or not."""
    for first_lands in (True, False):
        async with scripted(**TIMES) as (engine, transport):
            transport.auto = False
            began = anyio.current_time()
            await engine.serve(A)
            await anyio.sleep_until(began + 50)
            await engine.serve(B)
            if first_lands:
                transport.land(next(iter(transport.in_flight)))
            await anyio.sleep_until(began + 130)
            quarantined = 0 if first_lands else 2
            assert engine.runtime.statistics().host.num_quarantined == quarantined
            await anyio.sleep_until(began + 171)
            assert engine.runtime.statistics().host.num_quarantined == quarantined + 2
            transport.land_all()
            await turns()
            await assert_at_rest(engine.runtime)
            assert engine.runtime.statistics().host.num_quarantined == 0


async def test_a_copy_that_ends_as_its_time_is_up() -> None:
    """What a copy reports in time counts, even if the loop gets round to it only when the time is over."""
    async with scripted(**TIMES) as (engine, transport):
        transport.auto = False
        await engine.serve(A)
        engine.runtime.worker._is_signalled = True  # as if the wake-up were on its way, and late
        transport.land_all()
        await anyio.sleep(121)
        host = engine.runtime.statistics().host
        assert (host.num_cached, host.num_quarantined) == (2, 0)
        await assert_at_rest(engine.runtime)


async def test_a_load_that_nobody_bounds_any_more() -> None:
    """Without the task that looks at deadlines nobody waits for a copy: who waits already gives up, and who comes."""
    async with scripted(**TIMES) as (engine, transport):
        await on_the_host_only(engine, A, B)
        transport.auto = False
        began = anyio.current_time()
        found: list[int] = []

        async def serve() -> None:
            found.append(await engine.serve(A))

        with anyio.fail_after(1000):
            async with anyio.create_task_group() as group:
                group.start_soon(serve)
                await turns()
                engine.runtime.worker._scope.cancel()
            assert found == [0]
            assert await engine.serve(B) == 0
        assert anyio.current_time() == began
        transport.land_all()
        await turns()
        await assert_at_rest(engine.runtime)


async def test_a_request_deadline_ends_its_wait_for_a_load() -> None:
    """`deadline_s` is earlier than `load_timeout_s`: aborted then, and the load goes on without it."""
    async with scripted(**TIMES) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        began = anyio.current_time()
        async with engine.runtime.request(A, deadline_s=5) as request:
            await request.allocate()
            await request.load()
        assert (request.state, request.reason) == (RequestState.ABORTED, "deadline")
        assert anyio.current_time() - began == pytest.approx(5)
        engine.runtime.check_integrity()
        assert pinned(engine.runtime) == (2, 2)
        transport.land_all()
        await assert_at_rest(engine.runtime)
        assert engine.runtime.lookup(A).num_device_tokens == 8


async def test_sharers_of_a_hanging_load() -> None:
    """Each of those who share a load waits its own time, then takes blocks of its own; all compute the right bytes."""
    async with scripted(32, **TIMES) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        ends: list[float] = []
        began = anyio.current_time()

        async def serve(after_s: float) -> None:
            await anyio.sleep(after_s)
            assert await engine.serve(A) in (0, 8)  # a later one may find what an earlier one computed
            ends.append(anyio.current_time() - began)

        async with anyio.create_task_group() as group:
            for after_s in (0, 10, 20):
                group.start_soon(serve, after_s)
        assert ends == pytest.approx([30, 40, 50])
        engine.runtime.check_integrity()
        transport.auto = True
        transport.land_all()
        await assert_at_rest(engine.runtime)
        assert await engine.serve(A) == 8
        await assert_at_rest(engine.runtime)


async def test_giving_up_a_load_without_room_queues_again() -> None:
    """No room for blocks of its own: the request releases everything, waits at its old place, and is served later."""
    async with scripted(6, **TIMES) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        done: list[tuple[str, float]] = []
        began = anyio.current_time()

        async def serve() -> None:
            await engine.serve(A)
            done.append(("served", anyio.current_time() - began))

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            await turns()
            async with engine.runtime.request(B) as holder:
                holder.allocate_nowait()  # the rest
                await anyio.sleep(60)
                assert done == []
                engine.runtime.check_integrity()
                assert engine.runtime.statistics().num_waiting == 1
        assert done == [("served", pytest.approx(60))]
        transport.auto = True
        transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_room_lost_for_good_fails_who_can_no_longer_fit() -> None:
    """Quarantined blocks count as gone: a waiter that needs more than what is left is told, not left waiting."""
    async with scripted(6, **TIMES) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        outcomes: list[str] = []

        async def wants_all() -> None:
            try:
                async with engine.runtime.request(prompt(50, 1)) as request:
                    await request.allocate(24)
                    outcomes.append("got it")
            except OutOfBlocks as error:
                outcomes.append("retryable" if error.retryable else "never")

        async with anyio.create_task_group() as group:
            async with engine.runtime.request(A, deadline_s=1) as request:
                await request.allocate()
                await request.load()
            group.start_soon(wants_all)
            await anyio.sleep(100)
            assert outcomes == []
            await anyio.sleep(30)
            assert outcomes == ["never"]
        transport.land_all()
        await turns()
        await wants_all()
        assert outcomes == ["never", "got it"]
        await assert_at_rest(engine.runtime)


async def test_a_load_that_can_never_get_room_again() -> None:
    """Let go of everything and its room lost to a quarantine: `load` says so once, leaving is what is left to do."""
    async with scripted(4, **TIMES) as (engine, transport):
        await engine.serve(A)
        await engine.runtime.flush()
        await engine.evict_device()
        transport.auto = False
        async with engine.runtime.request(A) as request:
            await request.allocate(16)
            with pytest.raises(OutOfBlocks) as refused:
                await request.load()
            assert not refused.value.retryable
            engine.runtime.check_integrity()
        assert request.state is RequestState.ABORTED
        transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_closing_gives_up_after_its_own_bound() -> None:
    """Closing waits `close_timeout_s` for what hangs, and quarantines it; what ends afterwards is harmless."""
    async with scripted(**TIMES) as (engine, transport):
        transport.auto = False
        await engine.serve(A)
        began = anyio.current_time()
    assert anyio.current_time() - began == pytest.approx(10)
    found = engine.runtime.statistics()
    assert (found.host.num_quarantined, found.num_jobs, *pinned(engine.runtime)) == (2, 0, 0, 0)
    engine.runtime.check_integrity()
    transport.land_all()
    with pytest.raises(RuntimeClosed):
        await engine.serve(A)


async def test_a_load_that_lands_as_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lands after the timeout has fired and before the request hears of it: what it brought is ready."""
    async with scripted(**TIMES) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        wait = Request._wait

        async def land_last(request: Request, event: anyio.Event) -> None:
            await wait(request, event)
            assert request.state is RequestState.LOADING
            transport.land_all()
            engine.runtime.worker.drain()

        monkeypatch.setattr(Request, "_wait", land_last)
        began = anyio.current_time()
        assert await engine.serve(A) == 8
        assert anyio.current_time() - began == pytest.approx(30)
        transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_a_slow_copy_is_not_a_stalled_one() -> None:
    """A copy that takes long, but less than the bounds, is waited for and used."""
    async with scripted(**TIMES) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        found: list[int] = []

        async def serve() -> None:
            found.append(await engine.serve(A))

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            await anyio.sleep(29)
            transport.land_all()
        assert found == [8]
        transport.auto = True
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("bound_s", [30.0, 0.1])
async def test_a_load_ends_where_its_request_is_preempted(bound_s: float) -> None:
    """A load is lost, there is no room to compute instead, and another task preempts the request that waits for it:
    `load` returns at once, whether its own patience has ended or not."""
    async with scripted(10, auto=False, load_timeout_s=bound_s) as (engine, transport):
        tokens = prompt(1, 20)
        await engine.serve(tokens)
        await turns()
        transport.land_all()
        await engine.evict_device()
        ready: list[int] = []
        async with engine.runtime.request(tokens) as request, anyio.create_task_group() as tasks:
            await request.allocate()

            async def load() -> None:
                ready.append(await request.load())

            tasks.start_soon(load)
            await turns()
            async with engine.runtime.request(prompt(7, 20)) as other:
                await other.allocate()
                for job_id in list(transport.in_flight):
                    transport.lose(job_id)
                await turns()
                assert request.state is RequestState.REQUEUED and not request.block_ids[0]
                request.preempt_nowait()
                await turns()
            assert ready == [0] and request.state is RequestState.PREEMPTED

"""Loads that are awaited later: a fence for each region, steps that overlap them, and their ends."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from scripted import ScriptedTransport
from serving import (
    BACKENDS,
    GUARD_S,
    Engine,
    TagBlocks,
    TensorBlocks,
    assert_at_rest,
    config,
    loading,
    on_the_host_only,
    pinned,
    prompt,
    scripted,
    tag,
    turns,
    with_bytes,
)

from aoffload import CommitError, InvalidArgument, OffloadRuntime, RuntimeClosed, WrongState
from aoffload._kernel.plans import TransferPlan
from aoffload._transfer.fences import PASSED, Fence, RegionFences
from aoffload.transport import RegionNotLoaded

pytestmark = pytest.mark.anyio

A, B = prompt(1, 17), prompt(2, 17)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class WatchingTransport(ScriptedTransport):
    """Tells three regions apart: each is there when the test says so."""

    num_regions = 3

    def __init__(self, num_device_blocks: int) -> None:
        super().__init__(num_device_blocks, auto=True)
        self.watched: dict[int, RegionFences] = {}
        self.forgotten: list[int] = []
        self.launches: list[int] = []

    def watch(self, job_id: int, fences: RegionFences) -> None:
        assert job_id not in self.launches, "it was launched before anybody said that its regions are wanted"
        self.watched[job_id] = fences

    def forget(self, job_id: int) -> None:
        self.forgotten.append(job_id)

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        self.launches.append(plan.job_id)
        super().launch(plan, after)


@asynccontextmanager
async def watching(num_blocks: int = 16, **options: Any) -> AsyncIterator[tuple[Engine, WatchingTransport]]:
    transport = WatchingTransport(num_blocks + 1)
    made = config(**options)
    async with OffloadRuntime(made, transport=transport) as runtime:
        yield Engine(runtime, TagBlocks(transport), made.groups[0].block_size), transport


def compute(engine: Engine, table: list[int], start: int, tokens: list[int]) -> None:
    """The forward of an early step: reads what is expected, writes what follows."""
    size = engine.block_size
    for index in range(len(tokens) // size):
        right = tag(tokens[: (index + 1) * size])
        if index < start // size:
            assert engine.blocks.read(table[index]) == right
        else:
            engine.blocks.write(table[index], right)


# -- fences -----------------------------------------------------------------------------------------------------------


async def test_a_region_is_there_before_the_load_is() -> None:
    """Each fence passes when its region is copied; the others, and the request, go on waiting."""
    async with watching() as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            pending = await loading(request, transport)
            (job_id,) = transport.in_flight
            assert len(pending.regions) == 3 and not any(fence.query() for fence in pending.regions)
            transport.watched[job_id].give(0, PASSED)
            assert [fence.query() for fence in pending.regions] == [True, False, False]
            assert [fence.is_given for fence in pending.regions] == [True, False, False]
            pending.region(0).wait()
            pending.region(0).synchronize()
            assert not pending.is_over
            transport.land(job_id)
            assert await pending.wait() == 16
            assert all(fence.query() for fence in pending.regions)
            assert transport.forgotten == [job_id]


async def test_a_transport_that_knows_no_regions_has_one_fence_for_all() -> None:
    """Any region may be asked for; each is there when the whole load is."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            pending = await loading(request, transport)
            assert len(pending.regions) == 1 and not pending.region(77).query()
            transport.land_all()
            await pending.wait()
            assert pending.region(77).query()


async def test_nothing_to_load_is_there_at_once() -> None:
    """An engine treats every request alike."""
    async with watching() as (engine, _):
        async with engine.runtime.request(A) as request:
            await request.allocate()
            pending = request.load_nowait()
            assert pending.is_over and pending.can_start and pending.num_expected_tokens == 0
            assert all(fence.query() for fence in pending.regions)
            with engine.runtime.step([pending]):
                assert pending.block_ids == request.block_ids
                compute(engine, pending.block_ids[0], 0, A)
            assert await pending.wait() == 0 and pending.first_invalid_token is None
            request.commit(len(A))
            engine.check(request, A, len(A))


@pytest.mark.parametrize("index", [-1, 3, True, "0", None, 1.0])
async def test_a_region_that_there_is_not_is_refused_by_name(index: Any) -> None:
    """The number of a region, as `kv_caches` counts them."""
    async with watching() as (engine, _):
        async with engine.runtime.request(A) as request:
            await request.allocate()
            with pytest.raises(InvalidArgument, match="one of 3 regions") as refusal:
                request.load_nowait().region(index)
            assert refusal.value.argument == "index"


@pytest.mark.parametrize("end", ["fail", "corrupt", "lose", "refuse", "close"])
async def test_however_a_load_ends_nobody_waits_for_its_regions_for_ever(end: str) -> None:
    """A forward that sleeps for a region hears that it never comes: after a copy that failed, one that was never
    started, and from a runtime that is closed."""
    told: list[str] = []
    async with watching() as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            if end == "refuse":
                transport.refuse_next()
            pending = await loading(request, transport)
            if end == "close":
                engine.runtime.worker.copies.stop("closed")

            def forward() -> None:
                try:
                    pending.region(1).wait()
                except RegionNotLoaded as error:
                    told.append(str(error))

            thread = threading.Thread(target=forward)
            thread.start()
            for job_id in tuple(transport.in_flight) if end not in ("refuse", "close") else ():
                arguments = (1,) if end == "corrupt" else ()
                getattr(transport, end)(job_id, *arguments)
            with anyio.fail_after(GUARD_S):
                await pending.wait()
            thread.join(GUARD_S)
            assert not thread.is_alive() and len(told) == 1


async def test_a_queued_load_that_nobody_wants_any_more_ends_its_regions() -> None:
    """Its request has left before it was launched, while a thread was waiting for it."""
    async with watching(32, num_host_blocks=32, max_jobs_in_flight=1) as (engine, transport):
        await on_the_host_only(engine, A, B)
        async with engine.runtime.request(A) as first:
            blocking = await loading(first, transport)
            async with engine.runtime.request(B) as second:
                await second.allocate()
                pending = second.load_nowait()
                fence = pending.region(0)
            assert not fence.is_given
            transport.land_all()
            await blocking.wait()
            await turns()
            assert fence.is_given, "or the next line would wait for ever"
            with pytest.raises(RegionNotLoaded, match="no request waits"):
                fence.wait()
        transport.auto = True
        transport.land_all()
        await assert_at_rest(engine.runtime)
        assert engine.runtime.worker.copies.regions.num_watched == 0


async def test_who_shares_a_load_waits_for_its_regions_too() -> None:
    """Blocks that another request's job brings count like one's own: watched, if that load was; else as a whole."""
    async with watching(32) as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as first, engine.runtime.request(A) as second:
            await first.allocate()
            await second.allocate()
            transport.auto = False
            async with anyio.create_task_group() as group:
                group.start_soon(first.load)
                await turns()
                pending = second.load_nowait()
                assert not transport.watched, "a load that is waited for is copied as a whole"
                assert len(transport.in_flight) == 1 and not pending.region(2).query()
                transport.land_all()
                assert await pending.wait() == 16
            assert pending.region(2).query()


async def test_who_gives_up_a_shared_load_gives_it_up_for_nobody_else() -> None:
    """Its own forward is sent on; another one that waits for the same job goes on waiting, and gets its bytes."""
    async with watching(32) as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as first, engine.runtime.request(A) as second:
            await second.allocate()
            impatient = await loading(first, transport)
            patient = second.load_nowait()
            for region in impatient.regions:
                region.give_up("its client has left")
            with pytest.raises(RegionNotLoaded, match="has left"):
                impatient.region(0).wait()
            assert not any(region.is_given for region in patient.regions)
            transport.land_all()
            assert await patient.wait() == await impatient.wait() == 16
            assert all(region.query() for region in patient.regions)


async def test_a_job_that_ended_before_the_one_it_follows_is_no_reason_to_wait() -> None:
    """Its end is parked: no other completion of it will come."""
    async with watching(64, num_host_blocks=64, max_job_bytes=8) as (engine, transport):
        tokens = prompt(3, 65)
        await on_the_host_only(engine, tokens)
        async with engine.runtime.request(tokens) as first, engine.runtime.request(tokens) as second:
            await first.allocate()
            await second.allocate()
            transport.auto = False
            async with anyio.create_task_group() as group:
                group.start_soon(first.load)
                await turns()
                job_ids = list(transport.in_flight)
                assert len(job_ids) == 2
                transport.land(job_ids[1])
                await turns()
                pending = second.load_nowait()
                transport.land(job_ids[0])
                assert await pending.wait() == 64
            assert all(fence.query() for fence in pending.regions)


async def test_who_starts_on_a_region_has_it_from_one_job() -> None:
    """Split by blocks, the first region would be there when the last job has begun. What may not be in flight at once
    is split all the same."""
    for bound, num_jobs in (("1MiB", 1), (8, 2)):
        async with watching(64, num_host_blocks=64, max_job_bytes=4, max_bytes_in_flight=bound) as (engine, transport):
            tokens = prompt(3, 65)
            await on_the_host_only(engine, tokens)
            async with engine.runtime.request(tokens) as request:
                pending = await loading(request, transport)
                assert len(transport.watched) <= num_jobs == len(pending._jobs)
                while transport.in_flight:
                    transport.land(next(iter(transport.in_flight)))
                    await turns()
                assert await pending.wait() == 64


# -- steps ------------------------------------------------------------------------------------------------------------


async def test_an_early_step_computes_what_a_late_one_would() -> None:
    """What it wrote is committed, stored, and found by the next request."""
    async with with_bytes(num_host_blocks=32) as engine:
        await on_the_host_only(engine, A[:13])
        async with engine.runtime.request(A) as request:
            await request.allocate()
            pending = request.load_nowait()
            with engine.runtime.step([pending]):
                table, start = pending.block_ids[0], pending.num_expected_tokens

                def forward() -> None:
                    for region in pending.regions:
                        region.wait()
                    compute(engine, table, start, A)

                await anyio.to_thread.run_sync(forward)
            assert await pending.wait() == 12 and pending.first_invalid_token is None
            request.commit(len(A))
            engine.check(request, A, len(A))
        await engine.runtime.flush()
        await engine.evict_device()
        assert await engine.serve(A) == 16
        await assert_at_rest(engine.runtime)


async def test_commit_refuses_until_the_load_has_settled() -> None:
    """However far the forward is."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            pending = await loading(request, transport)
            with engine.runtime.step([pending]):
                pass
            with pytest.raises(WrongState, match="LOADING"):
                request.commit(len(A))
            transport.land_all()
            await pending.wait()
            request.commit(len(A))


async def test_a_load_that_fell_short_names_the_first_invalid_token() -> None:
    """Nothing that was computed on it is published; the request computes again, and goes on."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            pending = await loading(request, transport)
            with engine.runtime.step([pending]):
                transport.fail(next(iter(transport.in_flight)), 2)
                await turns()
                assert pending.is_over
            with pytest.raises(CommitError, match="from token 8 on"):
                request.commit(len(A))
            assert engine.runtime.lookup(A).num_device_tokens == 8
            assert await pending.wait() == 8 and pending.first_invalid_token == 8
            with engine.runtime.step([request]):
                engine.compute(request, A, 8)
            request.commit(len(A))
            assert pending.first_invalid_token == 8, "it goes on saying what was wrong"
            engine.check(request, A, len(A))
        transport.auto = True
        transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_who_polls_hears_of_it_as_well() -> None:
    """`is_over` and `first_invalid_token` say it at once. Looking alone lets nothing be committed: a debugger, or a
    line in a log, is not the engine."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            pending = await loading(request, transport)
            with engine.runtime.step([pending]):
                pass
            assert pending.first_invalid_token is None
            transport.fail(next(iter(transport.in_flight)))
            await turns()
            assert pending.is_over and pending.first_invalid_token == 0
            with engine.runtime.step([request]):
                engine.compute(request, A, 0)
            with pytest.raises(CommitError, match="from token 0 on"):
                request.commit(len(A))
            assert await pending.wait() == 0
            with engine.runtime.step([request]):
                engine.compute(request, A, 0)
            request.commit(len(A))


async def test_blocks_of_a_load_are_named_only_inside_of_a_step() -> None:
    """Until a step holds them they may be anybody's a moment later."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            pending = await loading(request, transport)
            with pytest.raises(WrongState, match="no step"):
                _ = pending.block_ids
            with engine.runtime.step([pending]):
                assert len(pending.block_ids[0]) == 5
            transport.land_all()
            await pending.wait()
        with pytest.raises(WrongState, match="ABORTED"):
            _ = pending.block_ids
        with pytest.raises(WrongState, match="ABORTED"), engine.runtime.step([pending]):
            pass


async def test_a_pending_load_of_before_starts_nothing_on_another_load() -> None:
    """Its fences have passed long ago: they say nothing of what is loaded again after a preemption."""
    async with watching() as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            before = await loading(request, transport)
            transport.land_all()
            await before.wait()
            await request.preempt()
            await engine.evict_device()
            engine.runtime.ledger.preemption.resume(request._live())
            pending = await loading(request, transport)
            assert before.region(0).query() and not pending.region(0).query()
            assert pending.can_start and not before.can_start
            with pytest.raises(WrongState, match="has begun another load"), engine.runtime.step([before]):
                pass
            with engine.runtime.step([pending]):
                transport.land_all()
                await turns()
            assert before.can_start, "there is nothing left to wait for"
        transport.auto = True
        transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_a_step_that_owns_its_thread_takes_pending_loads_too() -> None:
    """`run_step` and natively cancelled tasks: the blocks stay until the thread is through."""
    async with watching() as (engine, transport):
        await on_the_host_only(engine, A)
        waits, goes_on = threading.Event(), threading.Event()
        with anyio.CancelScope() as scope:
            async with engine.runtime.request(A) as request:
                pending = await loading(request, transport)

                def forward() -> None:
                    waits.set()
                    goes_on.wait(GUARD_S)

                async def cancel() -> None:
                    await anyio.to_thread.run_sync(waits.wait, GUARD_S)
                    scope.cancel()
                    request.cancel()
                    goes_on.set()

                async with anyio.create_task_group() as group:
                    group.start_soon(cancel)
                    await engine.runtime.run_step([pending], forward)
        transport.auto = True
        transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_a_runtime_that_closes_ends_the_wait_of_a_forward() -> None:
    """A thread in the middle of a forward hears of it, and so does the request."""
    started, closed = anyio.Event(), anyio.Event()

    async def serve(engine: Engine, transport: WatchingTransport) -> None:
        async with engine.runtime.request(A) as request:
            pending = await loading(request, transport)
            fence = pending.region(0)
            started.set()
            await closed.wait()
            with pytest.raises(RegionNotLoaded, match="closed"):
                fence.wait()
            with pytest.raises(RuntimeClosed):
                await pending.wait()

    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as group:
            async with watching(close_timeout_s=0.05) as (engine, transport):
                await on_the_host_only(engine, A)
                group.start_soon(serve, engine, transport)
                await started.wait()
            closed.set()


async def test_two_tensors_are_two_regions() -> None:
    """In the order in which they were given to the runtime."""
    blocks = TensorBlocks(17)
    async with OffloadRuntime(config(), blocks.tensors) as runtime:
        engine = Engine(runtime, blocks)
        await on_the_host_only(engine, A)
        async with runtime.request(A) as request:
            await request.allocate()
            pending = request.load_nowait()
            assert len(pending.regions) == 2
            await pending.wait()
        assert pinned(runtime) == (0, 0)


async def test_a_load_that_only_waits_for_its_step_sets_no_alarm() -> None:
    """Nothing is under way that could be late. Where the worker has ended an alarm rings at once, and who sets another
    one each time never sleeps beside the forward's thread."""
    async with watching(10) as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request, engine.runtime.request([*B, *B[:3]]) as crowd:
            pending = await loading(request, transport)
            await crowd.allocate()
            with engine.runtime.step([pending]):
                transport.lose(next(iter(transport.in_flight)))
                await turns()
                async with anyio.create_task_group() as group:
                    group.start_soon(pending.wait)
                    await turns()
                    assert not pending.is_over and not engine.runtime.worker._alarms
                    group.cancel_scope.cancel()

"""Programs that know nothing of anyio: asyncio's own groups, timeouts and cancellation around requests."""

from __future__ import annotations

import asyncio
import gc

import pytest
from serving import Engine, assert_at_rest, pinned, prompt, scripted, turns, with_bytes

from aoffload import Request, RequestAborted, RequestState

pytestmark = pytest.mark.asyncio

A, B, C = (prompt(seed, 9) for seed in range(1, 4))


async def stays(engine: Engine, token_ids: list[int], requests: list[Request] | None = None) -> None:
    """Is served, and keeps its blocks until somebody ends it."""
    async with engine.runtime.request(token_ids) as request:
        if requests is not None:
            requests.append(request)
        await engine.prefill(request, token_ids)
        await asyncio.Event().wait()


async def test_a_task_group() -> None:
    """Requests in an `asyncio.TaskGroup`: all are served, and one that fails cancels the others, pins and all."""
    async with with_bytes(64) as engine:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.serve(prompt(seed, 21))) for seed in range(1, 9)]
        assert [task.result() for task in tasks] == [0] * 8

        async def fails() -> None:
            async with engine.runtime.request(B) as request:
                await request.allocate()
                await turns()
                raise KeyError

        requests: list[Request] = []

        async def group_of_four() -> None:
            async with asyncio.TaskGroup() as group:
                for seed in range(1, 4):
                    group.create_task(stays(engine, prompt(seed, 21), requests))
                group.create_task(fails())

        with pytest.RaisesGroup(KeyError):
            await group_of_four()
        assert [(one.state, one.reason) for one in requests] == [(RequestState.ABORTED, "cancelled")] * 3
        await assert_at_rest(engine.runtime)


async def test_one_child_of_a_group_is_cancelled() -> None:
    """Cancelling one task of a group ends its request and nobody else's."""
    async with scripted() as (engine, _):
        requests: list[Request] = []
        go_on = asyncio.Event()

        async def goes_on() -> int:
            async with engine.runtime.request(B) as request:
                await engine.prefill(request, B)
                await go_on.wait()
                return request.num_computed_tokens
            raise AssertionError("cancelled")

        async with asyncio.TaskGroup() as group:
            victim = group.create_task(stays(engine, A, requests))
            sibling = group.create_task(goes_on())
            await turns()
            victim.cancel()
            await turns()
            assert requests[0].state is RequestState.ABORTED
            go_on.set()
        assert victim.cancelled()
        assert sibling.result() == 9
        await assert_at_rest(engine.runtime)


async def test_a_timeout_around_a_request() -> None:
    """`asyncio.timeout` outside of the request raises TimeoutError, and the pins are gone."""
    async with scripted() as (engine, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await stays(engine, A)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stays(engine, A), 0.001)
        await assert_at_rest(engine.runtime)
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0


async def test_a_timeout_inside_of_a_request() -> None:
    """`asyncio.timeout` around one step ends that step; the request is as it was, and tries again."""
    async with scripted(6) as (engine, _):
        async with engine.runtime.request(prompt(50, 1)) as holder, engine.runtime.request(A) as request:
            holder.allocate_nowait(24)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await request.allocate()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(request.allocate(), 0.001)
            assert request.state is RequestState.PINNED
            assert engine.runtime.statistics().num_waiting == 0
            engine.runtime.check_integrity()
            holder._session.release(holder._record, "preempted")
            assert await engine.prefill(request, A) == 0
        await assert_at_rest(engine.runtime)


async def test_steps_of_a_request_in_other_tasks() -> None:
    """`wait_for`, `gather` and `shield` run an await of the request in another task: it is the same request."""
    async with scripted(num_host_blocks=16) as (engine, transport):
        await engine.serve(A)
        await engine.runtime.flush()
        await engine.evict_device()
        transport.auto = False
        async with engine.runtime.request(A) as request:
            await asyncio.wait_for(request.allocate(), 20)
            shielded = asyncio.ensure_future(request.load())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(shielded), 0.001)
            transport.land_all()
            assert await asyncio.gather(shielded, request.load()) == [8, 8]
            engine.check(request, A, 8)
        await assert_at_rest(engine.runtime)


async def test_cancelling_a_task_that_waits() -> None:
    """`task.cancel()` while waiting for room, for a load, and inside the block: CancelledError, and nothing is left."""
    async with scripted(6, num_host_blocks=8) as (engine, transport):
        await engine.serve(A)
        await engine.runtime.flush()
        await engine.evict_device()
        transport.auto = False
        loading = asyncio.create_task(engine.serve(A))
        await turns()
        waiting = asyncio.create_task(engine.serve(prompt(60, 21)))
        await turns()
        assert engine.runtime.statistics().num_waiting == 1
        for task in (loading, waiting):
            task.cancel("client gone")
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.runtime.check_integrity()
        assert engine.runtime.statistics().num_requests == 0
        transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_cancelled_before_it_started() -> None:
    """A task that is cancelled before its first step never had a request."""
    async with scripted() as (engine, _):
        task = asyncio.create_task(engine.serve(A))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_at_rest(engine.runtime)


async def test_a_program_that_cancels_all_its_tasks() -> None:
    """Shutdown code that cancels everything it finds: requests are aborted, and the runtime still closes in order."""
    found: list[Request] = []

    async def program() -> None:
        async with with_bytes() as engine:
            tasks = [asyncio.create_task(stays(engine, one, found)) for one in (A, B, C)]
            while len(found) < 3 or any(one.state is not RequestState.RUNNING for one in found):
                await turns(1)
            mine = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not mine and task is not outer]
            assert len(others) >= 4  # the runtime's own is among them
            for task in others:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert pinned(engine.runtime)[0] == 0 or engine.runtime.statistics().num_jobs
            engine.runtime.check_integrity()

    outer = asyncio.current_task()
    await asyncio.wait_for(program(), 20)
    assert [one.state for one in found] == [RequestState.ABORTED] * 3


async def test_run_in_plain_tasks() -> None:
    """`runtime.run` under `wait_for` and `gather`: results, errors and aborts are those of plain awaits."""
    async with scripted() as (engine, _):

        async def works(request: Request) -> int:
            return await engine.prefill(request, A)

        async def waits(request: Request) -> None:
            await asyncio.Event().wait()

        run = engine.runtime.run
        assert await asyncio.wait_for(run(works, A), 20) == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run(waits, A), 0.001)
        aborted = asyncio.create_task(run(waits, A, request_id="r1"))
        await turns()
        engine.runtime.cancel("r1", "client gone")
        found = await asyncio.gather(run(works, A), aborted, run(works, A), return_exceptions=True)
        assert (found[0], found[2]) == (8, 8)
        assert isinstance(found[1], RequestAborted)
        await assert_at_rest(engine.runtime)


async def test_nothing_refers_to_a_finished_request() -> None:
    """A request that is over is garbage: neither the runtime, nor its loop, nor its tracebacks keep it."""
    async with scripted() as (engine, _):
        await engine.serve(A)
        for _ in range(3):
            await engine.serve(B)
            task = asyncio.create_task(stays(engine, A))
            await turns()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task
        gc.collect()
        # The interpreter may still have the last CancelledError, and its traceback, in its hands.
        of_this = [one for one in gc.get_objects() if type(one) is Request and one._runtime is engine.runtime]
        assert len(of_this) <= 1


async def test_verbs_in_a_callback_of_the_loop() -> None:
    """A callback that runs outside of any task may pin, hint and prefetch."""
    async with with_bytes(64, eviction="learned") as engine:
        await engine.serve(A)
        done = asyncio.get_running_loop().create_future()

        def callback() -> None:
            try:
                with engine.runtime.pins.hold(A, ttl_s=5.0) as pin:
                    done.set_result((pin.match.num_tokens, engine.runtime.hints.returns(A, in_s=5.0).num_tokens))
            finally:
                done.cancel()  # does nothing if it has its result

        asyncio.get_running_loop().call_soon(callback)
        num_pinned, num_spared = await done
        assert num_pinned == num_spared > 0

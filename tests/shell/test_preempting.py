"""Preemption: the blocks of a victim go to the waiting request, not back to the victim."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import anyio
import pytest
from serving import BACKENDS, GUARD_S, assert_at_rest, prompt, scripted, turns

from aoffload import OutOfBlocks, Preemption, Request, RequestState, WrongState

pytestmark = pytest.mark.anyio

A, B = prompt(1, 16), prompt(2, 16)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("lands", ["at once", "later"])
async def test_who_extends_is_served_before_the_victim(lands: str) -> None:
    """As docs/howto/preempting.md says it: a victim that resumes as soon as it may waits after who extends, also while
    its stores still read the blocks; when that one is done, the victim goes on with what it had computed."""
    async with scripted(8, auto=lands == "at once", num_host_blocks=32) as (engine, transport):
        order: list[str] = []
        begun, preempted = anyio.Event(), anyio.Event()
        victims: list[Request] = []

        async def victim() -> None:
            async with engine.runtime.request(B, "victim") as request:
                await engine.prefill(request, B)
                victims.append(request)
                begun.set()
                await preempted.wait()
                assert await request.resume(20) > 0
                order.append("victim")

        async with anyio.create_task_group() as group:
            async with engine.runtime.request(A, "first") as request:
                await engine.prefill(request, A)
                group.start_soon(victim)
                with anyio.fail_after(GUARD_S):
                    await begun.wait()
                with pytest.raises(OutOfBlocks):
                    request.extend_nowait(28)
                victims[0].preempt_nowait()
                preempted.set()
                if lands == "later":
                    group.start_soon(land_all, transport)
                with anyio.fail_after(GUARD_S):
                    await request.extend(28)
                order.append("first")
                request.commit(16)
                await turns()
                assert order == ["first"], "the victim waits"
        assert order == ["first", "victim"]
        if lands == "later":
            await land_all(transport)
        await assert_at_rest(engine.runtime)


async def land_all(transport: Any) -> None:
    for _ in range(50):
        await turns(2)
        transport.land_all()


async def test_preempting_what_has_nothing_to_give_is_no_error() -> None:
    """A task that preempts a request of another one cannot see what becomes of it. `preempt` answers that nothing is
    freed: when the request has no blocks yet, waits for free blocks, was preempted by a third task, or is over in
    either way. Only a request that was never entered is a mistake."""
    nothing = Preemption(0, 0, ())
    async with scripted(8, num_host_blocks=32) as (engine, _):
        runtime = engine.runtime
        with pytest.raises(WrongState, match="was not entered"):
            await runtime.request(A).preempt()
        async with runtime.request(A, "holder") as holder, runtime.request(B, "victim") as victim:
            assert await victim.preempt() == nothing, "it has no blocks yet"
            await engine.prefill(holder, A)
            async with anyio.create_task_group() as group:
                group.start_soon(holder.extend, 32)
                await turns()
                assert runtime.statistics().num_waiting == 0
                group.start_soon(victim.allocate)
                await turns()
                assert runtime.statistics().num_waiting == 1
                assert await victim.preempt() == nothing, "it waits for room"
                assert (await holder.preempt()).num_freed > 0
                assert await holder.preempt() == nothing, "it was preempted before"
            await victim.load()
            victim.commit(16)
        assert victim.state is RequestState.DONE
        assert await victim.preempt() == nothing
        assert await holder.preempt() == nothing
        with pytest.raises(WrongState, match="DONE"):
            victim.preempt_nowait()
        await runtime.flush()
        await assert_at_rest(runtime)


async def test_a_request_that_waits_for_more_blocks_keeps_those_that_it_has() -> None:
    """`preempt` frees nothing, and the request goes on once others have given blocks back."""
    async with scripted(8, num_host_blocks=32) as (engine, _):
        runtime = engine.runtime
        async with runtime.request(A, "waiter") as waiter, anyio.create_task_group() as group:
            await engine.prefill(waiter, A)
            async with runtime.request(B, "holder") as holder:
                await engine.prefill(holder, B)
                group.start_soon(waiter.extend, 32)
                await turns()
                assert runtime.statistics().num_waiting == 1
                assert await waiter.preempt() == Preemption(0, 0, ())
        assert waiter.state is RequestState.DONE
        await runtime.flush()
        await assert_at_rest(runtime)


async def test_a_victim_that_ends_during_its_last_step_frees_nothing_more() -> None:
    """`preempt` that waits for a step returns when the step is over and the request, too; the waiting request goes
    on."""
    async with scripted(8, num_host_blocks=32) as (engine, _):
        found: list[Preemption] = []

        async def preempts(victim: Request) -> None:
            found.append(await victim.preempt())

        async with anyio.create_task_group() as group:
            with ExitStack() as forward:
                async with engine.runtime.request(A) as victim:
                    await engine.prefill(victim, A)
                    forward.enter_context(engine.runtime.step([victim]))
                    group.start_soon(preempts, victim)
                    await turns()
                    assert found == []
        assert found == [Preemption(0, 0, ())]
        await engine.runtime.flush()
        await assert_at_rest(engine.runtime)

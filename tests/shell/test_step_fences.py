"""Loads in a runtime wait for the steps that have used their destinations, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedFence, ScriptedTransport
from serving import BACKENDS, Engine, on_the_host_only, prompt, scripted

from aoffload import InvalidArgument
from aoffload._transfer.fences import PASSED, OnlyAfter, StepFences

A, B, C = (prompt(name, 16) for name in (1, 2, 3))

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", BACKENDS)]


async def loaded_beside(engine: Engine, transport: ScriptedTransport, fence: ScriptedFence) -> Any:
    """The launch of a load of A while a step of another request is under way on the device."""
    async with engine.runtime.request(C) as other:
        await other.allocate()
        await other.load()
        transport.fence = fence
        with engine.runtime.step([other]):
            pass  # submitted, and not over on the device
        async with engine.runtime.request(A) as request:
            await request.allocate()
            transport.auto = False
            pending = request.load_nowait()
            launched = transport.launched[-1]
            fence.has_passed = True
            transport.land_all()
            await pending.wait()
            transport.auto = True
    return launched


async def test_a_load_does_not_wait_for_steps_of_others(anyio_backend: Any) -> None:
    """The first byte of a hit moves while a long forward of other requests runs."""
    async with scripted(12) as (engine, transport):
        await on_the_host_only(engine, A, B)
        await engine.serve(B)  # so that the blocks for A were last used in a step that is over
        launched = await loaded_beside(engine, transport, ScriptedFence())
        assert launched.recorded is None, "it waits for the whole stream"
        assert launched.after == OnlyAfter()


async def test_a_load_waits_for_the_step_that_used_its_blocks(anyio_backend: Any) -> None:
    """A forward may still run after its request has left: no load writes to its blocks before the forward is over."""
    async with scripted(4) as (engine, transport):
        await on_the_host_only(engine, A)
        fence = ScriptedFence()
        async with engine.runtime.request(B) as leaving:
            await leaving.allocate()
            await leaving.load()
            transport.fence = fence
            with engine.runtime.step([leaving]):
                pass
        transport.fence = PASSED  # as another stream would have it
        async with engine.runtime.request(A) as request:
            await request.allocate()
            transport.auto = False
            pending = request.load_nowait()
            launched = transport.launched[-1]
            assert launched.after == OnlyAfter((fence,)) and not launched.may_start
            fence.has_passed = True
            assert launched.may_start
            transport.land_all()
            await pending.wait()


async def test_a_step_without_a_fence_is_waited_for_with_all_others(anyio_backend: Any) -> None:
    """If a step has no fence, a load waits for the caller's stream, until a later step has a fence."""
    fences, running = StepFences(), ScriptedFence()
    fences.ended(1, PASSED)
    assert fences.before_load(1) == OnlyAfter()
    assert fences.before_load(0) is None, "unknown steps: wait for all compute"
    fences.ended(2, None)
    fences.ended(3, None)
    assert fences.before_load(1) == OnlyAfter()
    assert fences.before_load(2) is None
    fences.ended(4, running)
    assert fences.before_load(2) == OnlyAfter((running,)) == fences.before_load(4)
    assert fences.before_load(1) == OnlyAfter()
    running.has_passed = True
    assert fences.before_load(4) == OnlyAfter()


async def test_a_step_that_nobody_has_told_of_is_not_taken_for_over(anyio_backend: Any) -> None:
    """If a loop records no fence for one step, its loads wait for all compute until a later step has a fence."""
    fences, running = StepFences(), ScriptedFence()
    assert fences.before_load(1) is None
    fences.ended(1, PASSED)
    assert fences.before_load(2) is None
    fences.ended(3, running)
    assert fences.before_load(2) == OnlyAfter((running,)) == fences.before_load(3)
    assert fences.before_load(1) == OnlyAfter()


class BrokenFence(ScriptedFence):
    def query(self) -> bool:
        raise RuntimeError("no such event")


async def test_a_broken_fence_is_replaced_by_the_next_one(anyio_backend: Any) -> None:
    """A fence that always raises does not make loads fail for ever, and no list of steps grows after it."""
    fences = StepFences()
    fences.ended(1, BrokenFence())
    assert fences.before_load(1) is None
    running = ScriptedFence()
    fences.ended(2, running)
    assert fences.before_load(1) == OnlyAfter((running,)) == fences.before_load(2)
    running.has_passed = True
    assert fences.before_load(2) == OnlyAfter()
    for number in range(3, 1000):
        fences.ended(number, None)
    assert len(fences._pending) == 1 and fences.before_load(3) is None


async def test_a_step_whose_fence_raises_is_not_taken_for_over(anyio_backend: Any) -> None:
    """Whatever recording a fence raises, the ledger's step has ended: loads wait for all compute so far."""
    async with scripted(4) as (engine, transport):
        await on_the_host_only(engine, A)
        recorded, transport.fence = transport.record_fence, PASSED

        def broken() -> Any:
            raise RuntimeError("the driver does not know")

        async with engine.runtime.request(B) as leaving:
            await leaving.allocate()
            await leaving.load()
            transport.record_fence = broken  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="does not know"), engine.runtime.step([leaving]):
                pass
            transport.record_fence = recorded  # type: ignore[method-assign]
        async with engine.runtime.request(A) as request:
            await request.allocate()
            transport.auto = False
            pending = request.load_nowait()
            assert transport.launched[-1].after is None
            transport.land_all()
            await pending.wait()


@pytest.mark.parametrize("fences", [5, None, (None,), "ab"])
async def test_only_after_takes_fences(anyio_backend: Any, fences: Any) -> None:
    """The error names the argument; an iterator is read once."""
    with pytest.raises(InvalidArgument) as raised:
        OnlyAfter(fences)
    assert raised.value.argument == "fences"
    assert OnlyAfter(iter([PASSED])).fences == (PASSED,)  # type: ignore[arg-type]

"""Preempting for somebody: what a victim gives up goes to who is in line for it, not back to the victim."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from serving import BACKENDS, GUARD_S, assert_at_rest, prompt, scripted, turns

from aoffload import OutOfBlocks, Request

pytestmark = pytest.mark.anyio

A, B = prompt(1, 16), prompt(2, 16)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("lands", ["at once", "later"])
async def test_who_extends_is_served_before_the_victim(lands: str) -> None:
    """As docs/howto/preempting.md says it: a victim that resumes as soon as it may waits behind who extends, also while
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

"""Requests that wait for a call below the host that hangs, and the time that passes meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
from clocks import leap
from serving import GUARD_S, Engine, turns


class Hangs(Protocol):
    async def wait_for(self, num_calls: int = 1) -> None: ...

    def resume(self) -> None: ...


@asynccontextmanager
async def serving_until(hanging: Hangs, engine: Engine, token_ids: Sequence[int]) -> AsyncIterator[list[int]]:
    """Serve in a task, which has come to a call that hangs when the block begins. The call is released at the block's
    end. What is yielded gets the number of tokens that the request has hit."""
    found: list[int] = []

    async def serve() -> None:
        found.append(await engine.serve(token_ids))

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            await hanging.wait_for()
            yield found
            hanging.resume()
    finally:
        hanging.resume()


async def goes_on_after(seconds: float, found: list[int]) -> None:
    """The request waits nearly as long, on the clock that leaps, and goes on within 50 ms of it."""
    leap(0.9 * seconds)
    await turns(20)
    assert not found
    leap(0.1 * seconds + 0.05)
    with anyio.fail_after(GUARD_S):
        while not found:
            await turns(1)

"""How a program ends the tasks of live requests before it closes the runtime, as docs/howto/the-promise.md shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import FunctionType
from typing import Any

import anyio
import pytest
import torch
from anyio.abc import TaskGroup
from clocks import JUMPING, jumping_backend

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, RequestState, RuntimeClosed

pytestmark = pytest.mark.anyio
PAGE = Path(__file__).parents[2] / "docs/howto/the-promise.md"


@pytest.fixture(params=JUMPING)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return jumping_backend(request.param)


def recipe() -> Any:
    """The block of the page, as code with `await` at the top."""
    text = PAGE.read_text().partition("## Shutting down")[2]
    (found,) = re.findall(r"^```python\n(.*?)^```$", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    return compile(found, PAGE.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def config() -> OffloadConfig:
    return OffloadConfig(groups=[KVCacheGroup("all", block_size=4)], num_host_blocks=8)


async def test_the_recipe_of_the_page_leaves_no_task_behind() -> None:
    """Who is about to end ends; who waits for what never comes is cancelled when the grace is over."""
    ends: dict[str, tuple[RequestState, str, float]] = {}

    async def live(runtime: OffloadRuntime, name: str, seconds: float) -> None:
        try:
            async with runtime.request(range(9), name) as request:
                await request.allocate()
                await request.load()
                await anyio.sleep(seconds)
                request.commit(9)
        finally:
            ends[name] = (request.state, request.reason, anyio.current_time())

    async def admit(runtime: OffloadRuntime, tasks: TaskGroup) -> None:
        tasks.start_soon(live, runtime, "short", 5)
        tasks.start_soon(live, runtime, "stuck", 1e6)
        await anyio.sleep(1)

    began = anyio.current_time()
    names = {"OffloadRuntime": OffloadRuntime, "anyio": anyio, "admit": admit}
    await FunctionType(recipe(), {**names, "config": config(), "kv_cache": torch.zeros(9, 8)})()
    assert ends == {
        "short": (RequestState.DONE, "", pytest.approx(began + 5)),
        "stuck": (RequestState.ABORTED, "cancelled", pytest.approx(began + 11)),
    }


async def test_without_it_a_task_goes_on_until_its_next_call() -> None:
    """Closing ends its request, and wakes nobody who waits for something of the program's own."""
    said, seen = anyio.Event(), list[object]()

    async def live(runtime: OffloadRuntime) -> None:
        async with runtime.request(range(9)) as request:
            await said.wait()
            seen.append((request.state, request.reason))
            with pytest.raises(RuntimeClosed):
                await request.allocate()

    async with anyio.create_task_group() as tasks:
        async with OffloadRuntime(config(), torch.zeros(9, 8)) as runtime:
            tasks.start_soon(live, runtime)
            await anyio.sleep(1)
        await anyio.sleep(1)
        assert seen == []
        said.set()
    assert seen == [(RequestState.ABORTED, "runtime_closed")]

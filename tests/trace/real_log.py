"""A log that was lived through: a small runtime, and everything that its telemetry has a word for, or nearly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Request
from aoffload.demo.logs import make_logger

BLOCK = 16


def write_real(path: Path) -> list[dict[str, Any]]:
    """Two runtimes, one after the other; the events as they were written."""
    with path.open("w") as file:
        for run in ("first", "second"):
            anyio.run(_live, make_logger(file).bind(run=run))
    return [json.loads(text) for text in path.read_text().splitlines()]


async def _live(logger: Any) -> None:
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=9)
    async with OffloadRuntime(config, torch.zeros(9, 16), logger=logger) as runtime:
        for prompt in (range(60), range(100, 200), range(60)):
            async with runtime.request(prompt, f"talk-{prompt[0]}") as request:
                await _serve(request, len(prompt))
                request.log.info("sampled", token=7)
            await runtime.flush()
        with runtime.pins.hold(range(60), ttl_s=60):
            await runtime.transfers.demote(range(60)).wait()
            await runtime.transfers.prefetch(range(100, 200)).wait()
        await _wait_and_leave(runtime)
        await _step_aside(runtime)


async def _serve(request: Request, num_tokens: int) -> None:
    await request.allocate()
    await request.load()
    request.commit(num_tokens)


async def _wait_and_leave(runtime: OffloadRuntime) -> None:
    """One holds the whole device, one waits for blocks, gets none, and is cancelled."""

    async def wait(prompt: range, *, task_status: anyio.abc.TaskStatus[Request]) -> None:
        async with runtime.request(prompt, "waiter") as request:
            task_status.started(request)
            await request.allocate()

    async with runtime.request(range(500, 620), "holder") as holder, anyio.create_task_group() as tasks:
        await _serve(holder, 120)
        waiter = await tasks.start(wait, range(800, 900))
        await anyio.lowlevel.checkpoint()
        waiter.cancel("the client left")


async def _step_aside(runtime: OffloadRuntime) -> None:
    async with runtime.request(range(900, 980), "aside") as request:
        await _serve(request, 80)
        await request.preempt()
        await request.resume()

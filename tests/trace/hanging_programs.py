"""Two programs that hang, with their logs a minute later. Time passes while all tasks wait."""

from __future__ import annotations

import asyncio
import io
import selectors
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs
import structlog
import torch
import trio.testing
from anyio.abc import TaskGroup, TaskStatus
from prometheus_client import CollectorRegistry

from aoffload import HostCacheRuntime, KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload.metrics import Metrics, MetricsCollector
from aoffload.transport import Env

START_S = 1_800_000_000.0
"""2027-01-15 08:00 UTC."""
NUM_BLOCKS = 24


def jumping(name: str) -> tuple[str, dict[str, Any]]:
    """For the `anyio_backend` fixture: an event loop whose time passes when nobody has anything else to do."""
    if name == "trio":
        return name, {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return name, {"loop_factory": JumpingLoop}


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0 if timeout else timeout)
        if timeout and not found:
            self.now += timeout
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class LoopEnv(Env):
    """Its clock is the event loop's, in every thread."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = self.loop_clock()

    def now(self) -> float:
        return self._clock()


@attrs.define(eq=False)
class Stuck:
    runtime: OffloadRuntime
    registry: CollectorRegistry
    log: io.StringIO


def logger_into(log: io.StringIO, level: int) -> Any:
    """A logger whose time is that of the running event loop, which begins at `START_S`."""
    begun_s = anyio.current_time()

    def stamp(_: object, __: object, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "timestamp": START_S + anyio.current_time() - begun_s}

    return structlog.wrap_logger(
        structlog.WriteLogger(log),
        processors=[structlog.processors.add_log_level, stamp, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )


@asynccontextmanager
async def stuck(program: Callable[[OffloadRuntime, TaskGroup], Any], **options: Any) -> AsyncIterator[Stuck]:
    """A runtime, a minute after `program` was begun; it is ended by force."""
    log, engine_blocks = io.StringIO(), options.pop("engine_blocks", None)
    logger = logger_into(log, options.pop("level", 10))
    # No copies: they would end by a clock of their own.
    config = OffloadConfig(groups=[KVCacheGroup("all", block_size=4)], num_host_blocks=0, store_policy="off", **options)
    env, registry = LoopEnv(), CollectorRegistry()
    metrics = Metrics(env)
    kv_cache = torch.zeros(NUM_BLOCKS + 1, 4)
    given: dict[str, Any] = {"env": env, "logger": logger, "observers": [metrics]}
    made: Any
    if engine_blocks is None:
        made = OffloadRuntime(config, kv_cache, **given)
    else:
        made = HostCacheRuntime(config, kv_cache, engine_blocks=engine_blocks, **given)
    async with made as runtime:
        registry.register(MetricsCollector(runtime, metrics))
        async with anyio.create_task_group() as tasks:
            await program(runtime, tasks)
            await anyio.sleep(60)
            yield Stuck(runtime, registry, log)
            tasks.cancel_scope.cancel()


async def a_task_holds_all(runtime: OffloadRuntime, tasks: TaskGroup) -> None:
    await tasks.start(_hog, runtime)
    await anyio.sleep(1)
    tasks.start_soon(_waiter, runtime)


async def _hog(runtime: OffloadRuntime, *, task_status: TaskStatus[None]) -> None:
    async with runtime.request(range(4 * NUM_BLOCKS), "hog") as request:
        await request.allocate()
        await request.load()
        task_status.started()
        await anyio.sleep_forever()  # for something that never comes


async def _waiter(runtime: OffloadRuntime) -> None:
    async with runtime.request(range(1000, 1016), "waiter") as request:
        await request.allocate()


async def a_forward_hangs(runtime: OffloadRuntime, tasks: TaskGroup) -> None:
    await tasks.start(_client, runtime, tasks)
    await anyio.sleep(1)
    runtime.cancel("gone", "the client left")
    tasks.start_soon(_waiter, runtime)


async def _client(runtime: OffloadRuntime, tasks: TaskGroup, *, task_status: TaskStatus[None]) -> None:
    async with runtime.request(range(4 * NUM_BLOCKS), "gone") as request:
        await request.allocate()
        await request.load()
        await tasks.start(_forward, runtime, request)
        task_status.started()
        await anyio.sleep_forever()


async def _forward(runtime: OffloadRuntime, request: Any, *, task_status: TaskStatus[None]) -> None:
    with runtime.step([request]):
        task_status.started()
        await anyio.sleep_forever()

"""Opening a runtime with a slow transport: the event loop goes on, and an opening that is given up leaves nothing
open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import structlog
from scripted import ScriptedTransport
from serving import (
    ASYNCIO,
    EVERY_BACKEND,
    GUARD_S,
    UVLOOP,
    Checkpoints,
    Engine,
    TagBlocks,
    TensorBlocks,
    at_every_checkpoint,
    config,
    prompt,
    turns,
)

from aoffload import ConfigError, OffloadRuntime, RuntimeClosed
from aoffload._transfer.transport import PinProgress
from aoffload.transport import Env

pytestmark = pytest.mark.anyio

natively = pytest.mark.parametrize("anyio_backend", [ASYNCIO, UVLOOP], indirect=True)


@pytest.fixture(params=EVERY_BACKEND)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class SlowTransport(ScriptedTransport):
    """Opens when it is told to, and remembers what was done to it, and where."""

    opens_slowly = True

    def __init__(self, *, is_held: bool = True) -> None:
        super().__init__(17, auto=True)
        self.has_begun, self.may_open, self.has_closed = threading.Event(), threading.Event(), threading.Event()
        self.threads: list[int] = []
        self.error: Exception | None = None
        self._hear: Callable[[PinProgress], None] = lambda progress: None
        if not is_held:
            self.may_open.set()

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        self._hear = hear

    def open(self, *args: Any, **kwargs: Any) -> None:
        self.threads.append(threading.get_ident())
        self._hear(PinProgress(10, 30, 10, 2))
        self.has_begun.set()
        assert self.may_open.wait(GUARD_S)
        if self.error is not None:
            raise self.error
        self._hear(PinProgress(30, 30, 20, 2))
        super().open(*args, **kwargs)

    def close(self, timeout_s: float) -> bool:
        try:
            return super().close(timeout_s)
        finally:
            self.has_closed.set()

    @property
    def is_open(self) -> bool:
        return self._deliver is not None and not self.is_closed


def runtime_on(transport: SlowTransport, **options: Any) -> OffloadRuntime:
    return OffloadRuntime(config(), transport=transport, **options)


async def until(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, GUARD_S)


async def test_the_loop_goes_on_while_a_transport_opens() -> None:
    """It opens in another thread, once; the runtime can be used when it has, and is closed as any other."""
    transport = SlowTransport()
    served: list[int] = []

    async def live() -> None:
        async with runtime_on(transport) as runtime:
            served.append(await Engine(runtime, TagBlocks(transport)).serve(prompt(1, 9)))

    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as group:
            group.start_soon(live)
            await until(transport.has_begun)
            await turns()
            assert served == []
            transport.may_open.set()
    assert served == [0]
    assert transport.is_closed
    assert len(transport.threads) == 1 and threading.get_ident() not in transport.threads


async def test_what_is_fast_to_open_is_opened_in_place() -> None:
    """Memory that need not be pinned is a matter of microseconds: no thread, and no turn of the loop until then."""
    transport = SlowTransport(is_held=False)
    transport.opens_slowly = False
    async with runtime_on(transport):
        assert transport.threads == [threading.get_ident()]


async def test_every_piece_that_is_pinned_is_in_the_log() -> None:
    """Heard in the thread that opens, told in the loop, while it opens, in the context of the program."""
    is_logged = threading.Event()
    events: list[Any] = []

    def keep(_: Any, __: str, event: Any) -> Any:
        events.append((threading.get_ident(), event))
        is_logged.set()
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[structlog.contextvars.merge_contextvars, keep])
    transport = SlowTransport()

    async def live() -> None:
        with structlog.contextvars.bound_contextvars(engine="first"):
            async with runtime_on(transport, logger=logger):
                pass

    async with anyio.create_task_group() as group:
        group.start_soon(live)
        await until(is_logged)
        assert [event["event"] for _, event in events] == ["host_memory_page_locked"]
        transport.may_open.set()
    pinned = [event for _, event in events if event["event"] == "host_memory_page_locked"]
    names = ("piece_bytes", "num_bytes", "total_bytes", "num_pieces")
    assert [[event[name] for name in names] for event in pinned] == [[10, 10, 30, 2], [20, 30, 30, 2]]
    assert {event["engine"] for event in pinned} == {"first"}
    assert {thread for thread, _ in events} == {threading.get_ident()}


async def test_a_transport_that_cannot_open() -> None:
    """Its own error reaches the caller, as if it had been raised in place; there is nothing to close."""
    transport = SlowTransport(is_held=False)
    transport.error = ConfigError("num_host_blocks", "too many")
    runtime = runtime_on(transport)
    with pytest.raises(ConfigError, match="too many"):
        await runtime.__aenter__()
    assert not transport.has_closed.is_set()


async def test_a_scope_that_is_cancelled_while_it_opens() -> None:
    """It waits for the thread, which can't be recalled, and closes what was opened."""
    transport = SlowTransport()
    scope = anyio.CancelScope()

    async def live() -> None:
        with scope:
            async with runtime_on(transport):
                raise AssertionError("entered")

    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as group:
            group.start_soon(live)
            await until(transport.has_begun)
            scope.cancel()
            await turns()
            transport.may_open.set()
    assert not transport.is_open and transport.has_closed.is_set()


async def test_a_scope_that_is_cancelled_at_any_checkpoint_of_opening() -> None:
    """Whenever it comes, the transport is closed, or was never opened."""

    async def cancelled_at(k: int) -> bool:
        transport = SlowTransport(is_held=False)
        scope = anyio.CancelScope()
        checkpoints = Checkpoints(k, scope.cancel)
        runtime = runtime_on(transport)
        with scope:
            await checkpoints.run(runtime.__aenter__())
            await runtime.__aexit__(None, None, None)
        assert not transport.is_open
        return checkpoints.reached

    with anyio.fail_after(GUARD_S):
        assert await at_every_checkpoint(cancelled_at) > 1


@natively
@pytest.mark.parametrize("num_blows", [1, 3])
async def test_a_task_that_is_cancelled_natively_while_it_opens(num_blows: int) -> None:
    """The task ends at once; the thread that it leaves behind closes what it opens."""
    transport = SlowTransport()
    task = asyncio.create_task(runtime_on(transport).__aenter__())
    await until(transport.has_begun)
    with anyio.fail_after(GUARD_S):
        for _ in range(num_blows):
            task.cancel()
            await turns(2)
        while not task.done():
            await turns(1)
    assert task.cancelled()
    assert not transport.has_closed.is_set()
    transport.may_open.set()
    await until(transport.has_closed)
    assert not transport.is_open
    assert not [one for one in asyncio.all_tasks() if "aoffload" in one.get_name()]


class ThreadsToJoin(Env):
    """Threads that a test can wait for, whoever has given up on them."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []
        self.before_wake: Callable[[], object] = lambda: None

    async def run_in_thread(self, function: Callable[[], Any], limiter: Any = None) -> Any:
        await anyio.lowlevel.checkpoint()
        over, results = anyio.Event(), list[Any]()
        wake = self.loop_waker(over.set)

        def work() -> None:
            results.append(function())
            self.before_wake()
            wake()

        self.threads.append(self.start_thread(work, "opens"))
        with anyio.CancelScope(shield=True):
            await over.wait()
        return results[0]

    async def join(self) -> None:
        for thread in self.threads:
            await anyio.to_thread.run_sync(thread.join, GUARD_S)
            assert not thread.is_alive()


@natively
async def test_a_task_that_is_cancelled_natively_at_any_checkpoint_of_opening() -> None:
    """Before the thread has begun, while it opens, when it has opened and nobody knows, when the worker starts."""

    async def cancelled_at(k: int) -> bool:
        transport, env = SlowTransport(is_held=False), ThreadsToJoin()
        checkpoints = Checkpoints(k, lambda: task.cancel())

        async def live() -> None:
            runtime = runtime_on(transport, env=env)
            await checkpoints.run(runtime.__aenter__())
            await runtime.__aexit__(None, None, None)

        task = asyncio.create_task(live())
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        await env.join()
        assert not transport.is_open
        return checkpoints.reached

    with anyio.fail_after(GUARD_S):
        assert await at_every_checkpoint(cancelled_at) > 2


@natively
async def test_a_task_that_is_cancelled_natively_when_its_thread_is_through() -> None:
    """The thread has opened and left, and the task is cancelled before it hears of it: then the task closes."""
    transport, env = SlowTransport(is_held=False), ThreadsToJoin()
    loop = asyncio.get_running_loop()
    env.before_wake = lambda: loop.call_soon_threadsafe(task.cancel)
    task = asyncio.create_task(runtime_on(transport, env=env).__aenter__())
    await asyncio.wait([task])
    assert task.cancelled()
    await env.join()
    assert not transport.is_open and transport.has_closed.is_set()


class NoThreadInTime(Env):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Callable[[], object]] = []

    async def run_in_thread(self, function: Callable[[], Any], limiter: Any = None) -> Any:
        self.functions.append(function)
        await asyncio.Event().wait()


@natively
async def test_a_task_that_gives_up_before_its_thread_has_begun() -> None:
    """What nobody waits for is not opened at all."""
    transport, env = SlowTransport(is_held=False), NoThreadInTime()
    task = asyncio.create_task(runtime_on(transport, env=env).__aenter__())
    await turns(3)
    task.cancel()
    await asyncio.wait([task])
    env.functions[0]()
    assert transport.threads == []


async def test_a_call_before_or_after_its_block_is_refused() -> None:
    """The error says whether the runtime is not open yet or already closed."""
    runtime = OffloadRuntime(config(4), TensorBlocks(5).tensors)
    with pytest.raises(RuntimeClosed, match="is not open: use it inside"):
        runtime.lookup([1, 2, 3])
    async with runtime:
        runtime.lookup([1, 2, 3])
    with pytest.raises(RuntimeClosed, match="is closed: its `async with` block is over"):
        runtime.lookup([1, 2, 3])

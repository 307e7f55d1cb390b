"""Every public call of every handle of a runtime, made in another thread: `WrongThread`, or a right answer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyio
import pytest
from engine_serving import own_engine
from serving import BACKENDS, Engine, assert_at_rest, prompt, scripted, turns

from aoffload import (
    AoffloadError,
    ConfigError,
    HostCacheRuntime,
    OffloadRuntime,
    PendingLoad,
    Request,
    RequestState,
    WrongThread,
)
from aoffload._extensions.pins import PinState
from aoffload._runtime.handles import (
    RuntimeDisk,
    RuntimeFetches,
    RuntimeHints,
    RuntimePins,
    RuntimeReports,
    RuntimeTransfers,
    RuntimeWeights,
)
from aoffload._runtime.runtime import AnyRuntime
from aoffload._runtime.steps import StepScope
from aoffload.host_cache import EnginePendingLoad, EngineRequest
from aoffload.ledger import PendingDemotion, PendingFetch, PendingPrefetch, PinScope

pytestmark = pytest.mark.anyio
A = prompt(1, 9)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "request": (A,), "run": (lambda request: request.allocate(), A), "lookup": (A,), "prefetch": (A,),
    "fetch": (A,), "demote": (A,), "hold": (A, 60),
    "step": ([],), "run_step": ([], lambda: 0), "commit_step": ([],), "report_queue": (1,),
    "report_compute": (1, 1.0), "extend": (16,), "extend_nowait": (16,), "commit": (9,), "invalidate": (9,),
    "offer": (9, [[1, 2]]), "set": ("step-7",),
}  # fmt: skip
KEYWORDS: dict[str, dict[str, Any]] = {
    "match_again": {"num_device_tokens": 0}, "match_again_nowait": {"num_device_tokens": 0},
}  # fmt: skip
POSITIONAL = {
    "RuntimeHints.pin": (A, 60),
    "RuntimeHints.prefetch": (A,),
    "RuntimeHints.demote": (A,),
    "RuntimeHints.returns": (A,),
    "RuntimeHints.done": (A,),
    "RuntimeHints.apply": (A, []),
    "OffloadRuntime.cancel": ("r",),
    "HostCacheRuntime.cancel": ("r",),
    "Request.fetch": (),
    "EngineRequest.fetch": (),
    "PendingLoad.region": (0,),
    "EnginePendingLoad.region": (0,),
}
LEAVES = ("__exit__", "__aexit__")
ANY_THREAD: dict[str, Callable[[Any], bool]] = {
    "Request.request_id": lambda found: found == "r",
    "Request.state": lambda found: found is RequestState.RUNNING,
    "Request.reason": lambda found: found == "",
    "Request.match": lambda found: found.num_device_tokens == 8,
    "Request.num_computed_tokens": lambda found: found == 9,
    "Request.num_lost_tokens": lambda found: found == 0,
    "Request.log": lambda found: True,
    "PendingLoad.is_over": lambda found: found is True,
    "PendingLoad.region": lambda found: True,
    "PendingLoad.regions": lambda found: True,
    "PinScope.state": lambda found: found is PinState.HELD,
    "PinScope.match": lambda found: found.num_tokens == 8,
    "PinScope.has_lapsed": lambda found: found is False,
    "PendingPrefetch.is_over": lambda found: found is True,
    "PendingFetch.is_over": lambda found: found is True,
    "PendingDemotion.is_over": lambda found: found is True,
}
"""What reads one value, in any thread, and its right answer here. docs/howto/the-promise.md says so."""
ANY_THREAD |= {
    label.replace("Request.", "EngineRequest.").replace("PendingLoad.", "EnginePendingLoad."): is_right
    for label, is_right in ANY_THREAD.items()
    if label.startswith(("Request.", "PendingLoad."))
} | {
    "EngineRequest.match": lambda found: (found.num_device_tokens, found.num_host_tokens) == (0, 8),
    "EngineRequest.retry_max_hit_tokens": lambda found: found is None,
}
CANCELS = ("Request.cancel", "EngineRequest.cancel")


def _is_a(kind: type, found: object) -> bool:
    return isinstance(found, kind)


HANDLES: dict[str, Any] = {
    "pins": RuntimePins, "transfers": RuntimeTransfers, "fetches": RuntimeFetches,
    "disk": RuntimeDisk, "reports": RuntimeReports, "hints": RuntimeHints, "weights": RuntimeWeights,
}  # fmt: skip
OFF = ("fetches", "disk")
"""Handles that the runtimes of these tests don't have."""
ANY_THREAD |= {
    f"{kind.__name__}.{name}": partial(_is_a, ConfigError if name in OFF else handle)
    for kind in (OffloadRuntime, HostCacheRuntime)
    for name, handle in HANDLES.items()
    if hasattr(kind, name)
}
ALL = (
    *HANDLES.values(), OffloadRuntime, Request, PendingLoad, PinScope, PendingPrefetch, PendingFetch, PendingDemotion,
    StepScope, HostCacheRuntime, EngineRequest, EnginePendingLoad,
)  # fmt: skip


def members(kind: type) -> list[str]:
    """The public methods and properties of a handle, and what a `with` statement calls at its end."""
    public = [
        name
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    ]
    return public + [name for name in ("__enter__", "__aenter__", *LEAVES) if hasattr(kind, name)]


def called(handle: Any, name: str) -> Any:
    """What the member answers. A coroutine runs in a loop of this thread."""
    label = f"{type(handle).__name__}.{name}"
    if isinstance(inspect.getattr_static(handle, name), property):
        return getattr(handle, name)
    given = (None, None, None) if name in LEAVES else POSITIONAL.get(label, ARGUMENTS.get(name, ()))
    found = getattr(handle, name)(*given, **KEYWORDS.get(name, {}))
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def outcomes(handle: Any) -> dict[str, Any]:
    """By member: an error, or what it answers."""
    found: dict[str, Any] = {}
    for name in members(type(handle)):
        label = f"{type(handle).__name__}.{name}"
        if label in CANCELS or name in ("__exit__", "__aexit__"):
            continue
        try:
            found[label] = called(handle, name)
        except AoffloadError as error:
            found[label] = error
    return found


async def test_every_public_call_in_another_thread_is_refused_or_right() -> None:
    """No member of a runtime, a request, a pending load, a pin, a prefetch, a fetch, a demotion or a step does anything
    in another thread: it raises `WrongThread`, or reads one value, and that is right. Nothing has changed then."""
    async with scripted(eviction="learned") as (engine, _):
        runtime = engine.runtime
        await engine.serve(A)
        async with runtime.request(A, "r") as request:
            await request.allocate()
            pending = request.load_nowait()
            await pending.wait()
            request.commit(9)
            with runtime.pins.hold(A, 60) as pin:
                handles: list[Any] = [runtime, request, pending, pin, runtime.transfers.prefetch(A)]
                handles += [runtime.transfers.demote(prompt(7, 9)), runtime.step([request])]
                handles += [handle(runtime._session, runtime) for handle in HANDLES.values()]
                await turns()
                await check_all(runtime, handles)
        await assert_at_rest(runtime)


async def test_every_public_call_of_an_engine_is_refused_there_or_right() -> None:
    """The same for a runtime over blocks that an engine has, its requests and their pending loads."""
    async with own_engine(eviction="learned") as engine:
        runtime = engine.runtime
        await engine.stored(A)
        table = engine.pool.take(3)
        async with runtime.request(A, "r") as request:
            pending = request.load_nowait(into=[table])
            await pending.wait()
            request.offer(9, [table])
            with runtime.pins.hold(A, 60) as pin:
                handles = [handle(runtime._session, runtime) for handle in HANDLES.values()]
                await check_all(runtime, [runtime, request, pending, pin, *handles])
        engine.pool.release(table)
        await engine.assert_at_rest()


async def check_all(runtime: AnyRuntime, handles: Iterable[Any]) -> None:
    """Call every member of `handles` in another thread."""
    before = runtime.statistics()
    for handle in handles:
        found = await anyio.to_thread.run_sync(outcomes, handle)
        for label, answer in found.items():
            if label in ANY_THREAD:
                assert ANY_THREAD[label](answer), f"{label}: {answer!r}"
            elif not label.endswith("enter__"):  # entered before, most of them: refused as such
                assert isinstance(answer, WrongThread), f"{label}: {answer!r}"
    assert runtime.statistics() == before


def test_no_member_is_forgotten() -> None:
    """Each name that may be called in any thread is one that there is."""
    there = {f"{kind.__name__}.{name}" for kind in ALL for name in members(kind)}
    assert set(ANY_THREAD) - there == set()
    assert there >= {*CANCELS}


async def left_elsewhere(engine: Engine, make: Callable[[ExitStack], None]) -> None:
    """Enter in the loop's thread what `make` enters, and leave it in another one."""
    stack = ExitStack()
    make(stack)
    await anyio.to_thread.run_sync(stack.close)
    await turns()


async def test_a_block_that_is_left_in_another_thread_ends_in_the_loop() -> None:
    """Nothing changes in that thread, and nothing stays: a pin, a prefetch and a step end at the next turn."""
    async with scripted() as (engine, _):
        runtime = engine.runtime
        await engine.serve(A)
        async with runtime.request(A) as request:
            await engine.prefill(request, A)
            await left_elsewhere(engine, lambda stack: stack.enter_context(runtime.step([request])))
            await request.preempt()  # which waits for steps
            await left_elsewhere(engine, lambda stack: stack.enter_context(runtime.pins.hold(A, 60)))
            await left_elsewhere(engine, lambda stack: stack.enter_context(runtime.transfers.prefetch(A)))
            assert runtime.statistics().num_pins == 0
        await assert_at_rest(runtime)


async def test_a_request_that_is_left_in_another_thread_ends_in_the_loop() -> None:
    """It is released at the loop's next turn, and a warning says so; the task that entered it goes on."""
    async with scripted() as (engine, _):
        request = engine.runtime.request(A, "r", deadline_s=1e6)
        await request.__aenter__()
        await request.allocate()

        def leave() -> None:
            with pytest.warns(ResourceWarning, match="another thread"):
                asyncio.run(request.__aexit__(None, None, None))

        await anyio.to_thread.run_sync(leave)
        await turns()
        assert request.state is RequestState.ABORTED
        assert request._scope is not None
        request._scope.__exit__(None, None, None)
        await assert_at_rest(engine.runtime)


async def test_a_forward_that_reads_block_ids_is_told_to_read_them_before() -> None:
    """`run_step(…, lambda: forward(request.block_ids))` is refused, and the error says what to do instead; another
    thread is told where to call."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as request:
            await request.allocate()
            with pytest.raises(WrongThread, match=r"read `block_ids`.* before `run_step`"):
                await engine.runtime.run_step([request], lambda: request.block_ids)
            with pytest.raises(WrongThread, match="read `block_ids` there, before another thread"):
                await anyio.to_thread.run_sync(lambda: request.block_ids)
        await assert_at_rest(engine.runtime)


async def test_before_opening_and_after_closing_every_thread_may_look() -> None:
    """A runtime that does not change answers any thread: collectors of metrics read it at the end."""
    async with scripted() as (engine, _):
        await engine.serve(A)
        runtime = engine.runtime

    def look() -> int:
        runtime.check_integrity()
        runtime.explain()
        return runtime.statistics().num_requests + len(runtime.reports.requests()) + len(runtime.reports.holders())

    assert await anyio.to_thread.run_sync(look) == 0

"""Scopes: the blocks that a request, a step and `run` hold, for how long, and their log events."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import sniffio
import structlog
import trio
from scripted import ScriptedFence
from serving import (
    ASYNCIO,
    EVERY_BACKEND,
    GUARD_S,
    UVLOOP,
    Engine,
    assert_at_rest,
    pinned,
    prompt,
    scripted,
    turns,
    with_bytes,
)

from aoffload import (
    CommitError,
    Computed,
    DuplicateRequest,
    InvalidArgument,
    OutOfBlocks,
    PrefixMatch,
    Request,
    RequestAborted,
    RequestState,
)
from aoffload._common.prefix import Prefix
from aoffload._observe.log import WRITERS
from aoffload.ledger import JobMoved, RequestMoved

pytestmark = pytest.mark.anyio

A, B, C = (prompt(seed, 9) for seed in range(1, 4))

natively = pytest.mark.parametrize("anyio_backend", [ASYNCIO, UVLOOP], indirect=True)


@pytest.fixture(params=EVERY_BACKEND)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


# -- abandoned requests -------------------------------------------------------------------------------------------


async def tokens_of(engine: Engine, requests: list[Request], token_ids: list[int]) -> AsyncIterator[int]:
    """What servers write: a generator that streams tokens out of a request's block."""
    async with engine.runtime.request(token_ids) as request:
        requests.append(request)
        await engine.prefill(request, token_ids)
        for token in range(100):
            yield token


@natively
async def test_an_abandoned_generator_leaks_nothing() -> None:
    """A consumer that stops reading leaves a generator to the garbage collector: a warning, and every pin goes."""
    async with scripted() as (engine, _):
        requests: list[Request] = []

        async def reads_one_token() -> None:
            generator = tokens_of(engine, requests, A)
            assert await anext(generator) == 0
            assert pinned(engine.runtime)[0] == 3

        with pytest.warns(ResourceWarning, match="left in another task"):
            await collected(reads_one_token)
        assert (requests[0].state, requests[0].reason) == (RequestState.ABORTED, "abandoned")
        await assert_at_rest(engine.runtime)
        assert await engine.serve(A) == 8


async def test_an_abandoned_request_leaks_nothing() -> None:
    """A request that was entered and never left warns when it is collected, and the worker releases its pins."""
    async with scripted() as (engine, _):

        async def abandons() -> None:
            request = engine.runtime.request(A, "lost")
            await request.__aenter__()
            request.allocate_nowait()

        with pytest.warns(ResourceWarning, match="'lost' ALLOCATED> was abandoned"):
            await collected(abandons)
        with anyio.fail_after(GUARD_S):
            while engine.runtime.statistics().num_requests:
                await turns(1)
        await assert_at_rest(engine.runtime)
        await engine.serve(A, request_id="lost")


async def collected(abandons: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it in a task of its own, and collect what it left behind."""
    if sniffio.current_async_library() == "asyncio":
        await asyncio.create_task(abandons())
    else:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(abandons)
    gc.collect()
    await turns()


async def test_an_abandoned_request_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `-W error` the finaliser's warning is raised into nothing: the pins go all the same."""
    async with scripted() as (engine, _):
        raised: list[Any] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda about: raised.append(about.exc_type))

        async def abandons() -> None:
            request = engine.runtime.request(A, "lost")
            await request.__aenter__()
            request.allocate_nowait()

        await collected(abandons)
        assert raised == [ResourceWarning]
        await assert_at_rest(engine.runtime)


async def test_an_abandoned_request_that_another_thread_collects() -> None:
    """The collector runs wherever memory is short: a request found by another thread is released in the loop's."""
    async with scripted() as (engine, _):
        holder: list[Any] = []

        class Entered(Request):
            """Entered without a scope, so that nothing of its task refers to it."""

        session, prompt = engine.runtime._session, engine.runtime.request(A)._prompt
        assert isinstance(prompt, Prefix)
        request = Entered(session, prompt, "lost", None, {})
        request._prefix, request._record = prompt, request._admit(prompt)
        session.enter(request, request._record)
        request.allocate_nowait()
        holder.append(request)
        del request

        def collect() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                holder.clear()
                gc.collect()

        await anyio.to_thread.run_sync(collect)
        with anyio.fail_after(GUARD_S):
            while engine.runtime.statistics().num_requests:
                await turns(1)
        await assert_at_rest(engine.runtime)


@natively
async def test_leaving_in_another_task_warns() -> None:
    """A request that is left in another task than it was entered in gives everything back, and says what was wrong."""
    async with scripted() as (engine, _):
        request = engine.runtime.request(A)

        async def enter() -> None:
            await request.__aenter__()
            request.allocate_nowait()

        await asyncio.create_task(enter())
        with pytest.warns(ResourceWarning, match="left in another task"):
            await request.__aexit__(None, None, None)
        assert request.state is RequestState.ABORTED
        await assert_at_rest(engine.runtime)


async def test_nested_requests() -> None:
    """Requests may be nested in one task: each is cancelled on its own, and only its own block ends."""
    async with scripted() as (engine, _):
        ends: list[str] = []
        async with engine.runtime.request(A, "outer") as outer:
            await outer.allocate()
            async with engine.runtime.request(B, "inner") as inner:
                await inner.allocate()
                engine.runtime.cancel("inner", "client gone")
                await anyio.sleep_forever()
            ends.append("inner")
            assert outer.state is RequestState.ALLOCATED
            async with engine.runtime.request(C, "inner") as inner:
                engine.runtime.cancel("outer", "shutting down")
                await anyio.sleep_forever()
            ends.append("unreachable")
        assert ends == ["inner"]
        assert (inner.reason, outer.reason) == ("cancelled", "shutting down")
        await assert_at_rest(engine.runtime)


# -- run ----------------------------------------------------------------------------------------------------------


async def test_run_returns_or_raises_what_its_function_does() -> None:
    """`run` is a call: the result, or the very exception, not a group of it."""
    async with scripted() as (engine, _):

        async def works(request: Request) -> tuple[str, int]:
            return request.request_id, await engine.prefill(request, A)

        async def fails(request: Request) -> None:
            await request.allocate()
            raise KeyError("on purpose")

        assert await engine.runtime.run(works, A, request_id="r1") == ("r1", 0)
        assert await engine.runtime.run(works, A, request_id="r1") == ("r1", 8)
        with pytest.raises(KeyError, match="on purpose"):
            await engine.runtime.run(fails, A)
        async with engine.runtime.request(B, "r1"):
            with pytest.raises(DuplicateRequest):
                await engine.runtime.run(works, A, request_id="r1")
        with pytest.raises(OutOfBlocks):
            await engine.runtime.run(lambda request: request.allocate(1000), A)
        await assert_at_rest(engine.runtime)


async def test_run_uses_a_task_of_its_own() -> None:
    """What the function does to its task stays there: its context variables, and whatever is cancelled by task."""
    variable: ContextVar[str] = ContextVar("variable", default="the caller's")
    async with scripted() as (engine, _):

        async def works(request: Request) -> int:
            variable.set("the function's")
            return anyio.get_current_task().id

        assert await engine.runtime.run(works, A) != anyio.get_current_task().id
        assert variable.get() == "the caller's"
        await assert_at_rest(engine.runtime)


async def test_run_says_that_it_was_aborted() -> None:
    """A request of `run` that is cancelled by name, or by its deadline, raises `RequestAborted` in the caller."""
    async with scripted() as (engine, _):

        async def waits(request: Request) -> None:
            await anyio.sleep_forever()

        async def cancel() -> None:
            while not engine.runtime.cancel("r1", "client gone"):
                await turns(1)

        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as group:
                group.start_soon(cancel)
                with pytest.raises(RequestAborted, match="client gone") as aborted:
                    await engine.runtime.run(waits, A, request_id="r1")
            assert (aborted.value.request_id, aborted.value.reason) == ("r1", "client gone")
            with pytest.raises(RequestAborted, match="deadline"):
                await engine.runtime.run(waits, A, deadline_s=0)
        await assert_at_rest(engine.runtime)


async def test_cancelling_the_caller_of_run() -> None:
    """A scope around `run` cancels it and is not taken for an abort."""
    async with scripted() as (engine, _):
        with anyio.move_on_after(0) as scope:
            await engine.runtime.run(lambda _: anyio.sleep_forever(), A)
        assert scope.cancelled_caught
        await assert_at_rest(engine.runtime)


@natively
async def test_cancelling_the_caller_of_run_natively() -> None:
    """`task.cancel()` on one caller of `run` cancels its request, and none of those that run beside it."""
    async with scripted() as (engine, _):
        go_on = anyio.Event()

        async def waits(request: Request) -> int:
            await request.allocate()
            await go_on.wait()
            return 7

        tasks = [asyncio.create_task(engine.runtime.run(waits, one)) for one in (A, B, C)]
        await turns()
        assert engine.runtime.statistics().num_requests == 3
        tasks[1].cancel()
        await turns()
        assert engine.runtime.statistics().num_requests == 2
        go_on.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert (found[0], found[2]) == (7, 7)
        assert isinstance(found[1], asyncio.CancelledError)
        await assert_at_rest(engine.runtime)


# -- steps --------------------------------------------------------------------------------------------------------


async def test_a_step_holds_the_blocks_of_a_cancelled_request() -> None:
    """A forward in a thread goes on writing after its request was cancelled: until then nobody is given its blocks."""
    async with with_bytes(6) as engine:
        runtime = engine.runtime
        entered, go_on, written = threading.Event(), threading.Event(), threading.Event()
        tables: list[list[int]] = []

        def forward(block_ids: list[int]) -> None:
            entered.set()
            assert go_on.wait(GUARD_S)
            for block_id in block_ids:
                engine.blocks.write(block_id, 666)
            written.set()

        async def step(request: Request) -> None:
            tables.append(request.block_ids[0])
            with runtime.step([request]):
                await anyio.to_thread.run_sync(forward, tables[0])

        async def other() -> None:
            await engine.serve(prompt(7, 21))  # checks its bytes

        async with anyio.create_task_group() as group:
            async with runtime.request(A, "victim") as request:
                await request.allocate()
                group.start_soon(step, request)
                assert await anyio.to_thread.run_sync(entered.wait, GUARD_S)
                runtime.cancel("victim")
                await anyio.sleep_forever()
            assert request.state is RequestState.ABORTED
            runtime.check_integrity()
            assert pinned(runtime) == (3, 0)
            async with runtime.request(B) as beside:
                beside.allocate_nowait()
                assert set(beside.block_ids[0]).isdisjoint(tables[0])
                engine.compute(beside, B, 0)
                group.start_soon(other)
                await turns()
                assert runtime.statistics().num_waiting == 1
                go_on.set()
                assert await anyio.to_thread.run_sync(written.wait, GUARD_S)  # or the turns take the thread's
                with anyio.fail_after(GUARD_S):
                    while pinned(runtime)[0] > 3:
                        await turns(1)
                beside.commit(9)
                engine.check(beside, B, 9)
        await assert_at_rest(runtime)


async def test_steps_may_overlap() -> None:
    """A request in two steps, or twice in one, is held until the last of them ends."""
    async with scripted() as (engine, _):
        runtime = engine.runtime
        async with runtime.request(A) as request:
            await request.allocate()
            first, second = runtime.step([request, request]), runtime.step([request])
            first.__enter__()
            second.__enter__()
        assert pinned(runtime) == (3, 0)
        first.__exit__(None, None, None)
        assert pinned(runtime) == (3, 0)
        runtime.check_integrity()
        second.__exit__(None, None, None)
        assert pinned(runtime) == (0, 0)
        await assert_at_rest(runtime)


async def test_one_fence_for_a_step() -> None:
    """`commit_step` records one fence after the forward, and every store of the step waits for that one."""
    async with scripted(auto=False) as (engine, transport):
        transport.fence = ScriptedFence()
        recorded: list[Any] = []
        record = transport.record_fence

        def counted() -> Any:
            recorded.append(record())
            return recorded[-1]

        transport.record_fence = counted  # type: ignore[method-assign]
        async with engine.runtime.request(A) as first, engine.runtime.request(B) as second:
            for request, token_ids in ((first, A), (second, B)):
                await request.allocate()
                engine.compute(request, token_ids, 0)
            engine.runtime.commit_step([Computed(first, 9), Computed(second, 9)])
            assert len(recorded) == 1
            assert [job.after for job in transport.launched] == [transport.fence] * 2
            transport.fence.has_passed = True
            transport.land_all()
            await engine.runtime.flush()
            await first.extend(13)
            engine.runtime.commit_step([Computed(first, 12, [1, 2, 3])], after=transport.fence)
            assert len(recorded) == 1
            assert first.num_computed_tokens == 12
            transport.land_all()
        await assert_at_rest(engine.runtime)


async def test_a_step_commits_for_those_who_are_left() -> None:
    """A request that was aborted while the forward ran is no reason to commit for none of the others."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as first, engine.runtime.request(C) as last:
            async with engine.runtime.request(B) as aborted:
                for request, token_ids in ((first, A), (aborted, B), (last, C)):
                    await request.allocate()
                    engine.compute(request, token_ids, 0)
            engine.runtime.commit_step([Computed(first, 9), Computed(aborted, 9), Computed(last, 9)])
            assert (first.num_computed_tokens, last.num_computed_tokens) == (9, 9)
        assert engine.runtime.lookup(B).num_tokens == 0
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("wrong", ["beyond", "twice", "bad tokens"])
async def test_a_step_commits_for_all_or_for_nobody(wrong: str) -> None:
    """What is wrong with the commit of one is refused before that of another is made, so the step can be repeated."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as first, engine.runtime.request(B) as second:
            for request, token_ids in ((first, A), (second, B)):
                await request.allocate()
                engine.compute(request, token_ids, 0)
            bad = {
                "beyond": Computed(second, 99),
                "twice": Computed(first, 9),
                "bad tokens": Computed(second, 9, [-1]),
            }[wrong]
            with pytest.raises((CommitError, InvalidArgument)):
                engine.runtime.commit_step([Computed(first, 9, [5]), bad])
            assert first.num_computed_tokens == 0
            engine.runtime.commit_step([Computed(first, 9, [5]), Computed(second, 9)])
            assert (first.num_computed_tokens, second.num_computed_tokens) == (9, 9)
        await assert_at_rest(engine.runtime)


async def test_a_step_leaves_out_who_was_preempted() -> None:
    """A request that was preempted while the forward ran has lost what it computed; the others have not."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as first, engine.runtime.request(B) as second:
            for request, token_ids in ((first, A), (second, B)):
                await request.allocate()
                engine.compute(request, token_ids, 0)
            first.preempt_nowait()
            engine.runtime.commit_step([Computed(first, 9), Computed(second, 9)])
            assert (first.num_computed_tokens, second.num_computed_tokens) == (0, 9)
            assert await first.resume() == 0
        await assert_at_rest(engine.runtime)


# -- the log ------------------------------------------------------------------------------------------------------


class Events(list[dict[str, Any]]):
    """A structlog logger that keeps what it is told, with what was pinned at that moment."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.logger = structlog.wrap_logger(None, processors=[self._keep], wrapper_class=structlog.BoundLogger)

    def _keep(self, _: Any, level: str, event: Any) -> Any:
        found = pinned(self.engine.runtime) if self.engine is not None else None
        self.append({**event, "level": level, "pinned": found})
        raise structlog.DropEvent

    def of(self, request_id: str) -> list[str]:
        return [one["event"] for one in self if one.get("request_id") == request_id]


async def test_one_event_for_every_move() -> None:
    """A request's events are the states it went through, one each, in order; jobs have theirs."""
    events = Events()
    async with scripted(logger=events.logger) as (engine, _):
        await engine.serve(A, request_id="first")
        await engine.runtime.flush()
        await engine.evict_device()
        await engine.serve(A, request_id="loads")
        await engine.runtime.flush()
        async with engine.runtime.request(A, "aborted"):
            pass
    moves = ["request_matched", "request_pinned", "request_allocated"]
    assert events.of("first") == [*moves, "request_running", "job_launched", "request_done", "job_completed"]
    expected = [*moves, "request_loading", "job_launched", "job_completed", "request_running", "request_done"]
    assert sorted(events.of("loads")) == sorted(expected)
    assert [name for name in events.of("loads") if name.startswith("request")] == [
        name for name in expected if name.startswith("request")
    ]
    assert events.of("aborted") == ["request_matched", "request_pinned", "request_aborted"]
    kinds = Counter(one["event"] for one in events)
    assert (kinds["runtime_opened"], kinds["runtime_closed"]) == (1, 1)


async def test_one_event_for_every_abort_when_its_pins_are_gone() -> None:
    """An aborted request has exactly one `request_aborted`, with its reason, logged when nothing of it is pinned."""
    events = Events()
    async with scripted(num_host_blocks=16, auto=False, logger=events.logger) as (engine, transport):
        events.engine = engine
        await engine.serve(A)
        transport.land_all()
        await engine.runtime.flush()
        await engine.evict_device()
        reasons: dict[str, str] = {}
        for name in ("closed_early", "client gone", "deadline", "error: KeyError", "cancelled"):
            deadline_s = 0 if name == "deadline" else None
            try:
                with anyio.CancelScope() as scope:
                    async with engine.runtime.request(A, name, deadline_s=deadline_s) as request:
                        if name == "client gone":
                            request.cancel(name)
                        elif name == "cancelled":
                            scope.cancel()
                        elif name == "error: KeyError":
                            await request.allocate()
                            raise KeyError
                        if name != "closed_early":
                            await request.allocate()
                            await anyio.lowlevel.checkpoint()
            except KeyError:
                pass
            reasons[name] = request.reason
        aborted = [one for one in events if one["event"] == "request_aborted"]
        mine = [one for one in aborted if one["request_id"] in reasons]
        assert {one["request_id"]: one["reason"] for one in mine} == {name: name for name in reasons} == reasons
        assert len(mine) == len(reasons)
        assert {one["pinned"] for one in mine} == {(0, 0)}
        await assert_at_rest(engine.runtime)


async def test_events_reach_a_configured_structlog() -> None:
    """Without `logger=`, the program's own structlog configuration is used, whatever it is."""
    try:
        structlog.configure(processors=[structlog.processors.add_log_level])
        with structlog.testing.capture_logs() as found:
            async with scripted() as (engine, _):
                await engine.serve(A, request_id="r1")
        assert "request_matched" in [one["event"] for one in found if one.get("request_id") == "r1"]
    finally:
        structlog.reset_defaults()


async def test_a_program_without_structlog_hears_of_trouble_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Where structlog was never configured, a healthy runtime prints nothing."""
    async with scripted() as (engine, _):
        await engine.serve(A)
        async with engine.runtime.request(B):
            pass
    assert capsys.readouterr() == ("", "")


async def test_a_logger_that_fails_harms_nobody() -> None:
    """A log file on a full disk raises at every event: requests are served, cancelled and closed as ever."""

    def full(*_: Any) -> Any:
        raise OSError("No space left on device")

    logger = structlog.wrap_logger(None, processors=[full], wrapper_class=structlog.BoundLogger)
    async with scripted(logger=logger) as (engine, _):
        assert await engine.serve(A) == 0
        await engine.runtime.flush()
        await engine.evict_device()
        assert await engine.serve(A) == 8
        async with engine.runtime.request(A) as request:
            request.cancel()
            await request.allocate()
        assert request.state is RequestState.ABORTED
        await assert_at_rest(engine.runtime)


async def test_filtered_events_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events below the logger's level reach no processor, and no move of a request or a job is described for them."""
    calls: list[Any] = []
    for kind in (RequestMoved, JobMoved):
        monkeypatch.setitem(WRITERS, kind, lambda *args: calls.append(args))

    def never(*args: Any) -> Any:
        calls.append(args)
        raise structlog.DropEvent

    filtering = structlog.make_filtering_bound_logger(40)
    logger = structlog.wrap_logger(None, processors=[never], wrapper_class=filtering)
    async with scripted(logger=logger) as (engine, _):
        await engine.serve(A)
        async with engine.runtime.request(A):
            pass
        await engine.runtime.flush()
    assert calls == []


async def test_a_level_that_changes_counts_from_then_on() -> None:
    """Whether anybody listens is asked at each move: a program turns its debugging on while the runtime is open."""
    events, heard_from = Events(), [30]

    class Levelled(structlog.BoundLogger):
        def is_enabled_for(self, level: int) -> bool:
            return level >= heard_from[0]

    logger = structlog.wrap_logger(None, processors=[events._keep], wrapper_class=Levelled)
    async with scripted(logger=logger) as (engine, _):
        await engine.serve(A, request_id="before")
        heard_from[0] = 20
        await engine.serve(B, request_id="after")
    assert events.of("before") == []
    assert events.of("after") == ["request_done"]


async def test_a_request_logs_with_its_own_id() -> None:
    """`request.log` is the runtime's logger with the request's id on it."""
    events = Events()
    async with scripted(logger=events.logger) as (engine, _):
        async with engine.runtime.request(A, "r1") as request:
            request.log.info("tokenised", num_tokens=9)
    assert {"event": "tokenised", "request_id": "r1", "num_tokens": 9, "level": "info", "pinned": None} in events


# -- what a person sees -------------------------------------------------------------------------------------------


async def test_a_request_that_was_not_entered_has_nothing() -> None:
    """It may be asked what it is before its block: no hit, no tokens, no reason, and no pin is taken for the answer."""
    async with scripted() as (engine, _):
        await engine.serve(A)
        request = engine.runtime.request(A)
        assert request.match == PrefixMatch(0, 0)
        assert (request.state, request.reason, request.num_computed_tokens) == (RequestState.QUEUED, "", 0)
        await assert_at_rest(engine.runtime)


async def test_representations() -> None:
    """A repr tells a person, and a test, what is what; it never raises, whatever the state."""
    async with scripted() as (engine, _):
        runtime = engine.runtime
        assert repr(runtime) == "<OffloadRuntime open <Ledger device 16/16 free, host 16/16 free, 0 requests>>"
        request = runtime.request(A, "r1")
        assert repr(request) == "<Request 'r1' QUEUED>"
        assert repr(runtime.request(A)) == "<Request '(not entered)' QUEUED>"
        async with request:
            assert repr(request) == "<Request 'r1' PINNED>"
            await request.allocate()
            assert repr(request) == "<Request 'r1' ALLOCATED>"
            assert "13/16 free" in repr(runtime)
            assert "1 requests" in repr(runtime)
        assert repr(request) == "<Request 'r1' ABORTED>"
        assert (request.state, request.reason, request.request_id) == (RequestState.ABORTED, "closed_early", "r1")
    assert repr(runtime).startswith("<OffloadRuntime closed ")


@pytest.mark.parametrize("anyio_backend", [ASYNCIO], indirect=True)
async def test_a_group_with_an_error_in_it_is_no_cancellation() -> None:
    """The reason of an abort names the error, also where a cancellation came with it; a group of nothing but
    cancellations is one."""
    cancelled = asyncio.CancelledError
    groups = {
        "error: BaseExceptionGroup": BaseExceptionGroup("both", [cancelled(), KeyError()]),
        "cancelled": BaseExceptionGroup("outer", [cancelled(), BaseExceptionGroup("inner", [cancelled()])]),
    }
    async with scripted() as (engine, _):
        for reason, group in groups.items():
            request = engine.runtime.request(prompt(1, 5))
            with pytest.raises(BaseExceptionGroup):
                async with request:
                    raise group
            assert request.reason == reason

"""Requests in async generators: a task that iterates one runs its own code between two steps of the request's block."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio
import pytest
import sniffio
import trio
from clocks import JUMPING, jumping_backend
from serving import BACKENDS, Engine, assert_at_rest, pinned, prompt, scripted, turns

from aoffload import InvalidArgument, Request, RequestAborted, RequestState, RuntimeClosed

pytestmark = pytest.mark.anyio

A, B = prompt(1, 9), prompt(2, 9)

in_time_that_jumps = pytest.mark.parametrize("anyio_backend", JUMPING, indirect=True)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param if isinstance(request.param, tuple) else jumping_backend(request.param)


async def tokens_of(
    engine: Engine, requests: list[Request], token_ids: list[int], **options: Any
) -> AsyncIterator[int]:
    """What servers write: a generator that streams tokens out of a request's block."""
    async with engine.runtime.request(token_ids, **options) as request:
        requests.append(request)
        await engine.prefill(request, token_ids)
        for token in range(100):
            yield token
            engine.check(request, token_ids, len(token_ids))


@contextmanager
def abandonments() -> Iterator[list[str]]:
    """What `ResourceWarning`s say of requests. Trio has one of its own for each generator that it finds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        yield found
    assert {warning.category for warning in caught} <= {ResourceWarning}
    found += [str(warning.message) for warning in caught if "<Request" in str(warning.message)]


async def in_another_task(function: Callable[[], Awaitable[None]]) -> None:
    async def call() -> None:  # `aclose` of a generator returns no coroutine, which older versions of anyio want
        await function()

    async with anyio.create_task_group() as group:
        group.start_soon(call)


async def test_an_abandoned_generator_breaks_nothing_of_its_reader() -> None:
    """The task that opened the runtime stops reading a stream, inside of cancel scopes of its own. Pins go with a
    warning, its scopes and the runtime are left as if nothing had been."""
    requests: list[Request] = []
    with abandonments() as found:
        async with scripted() as (engine, _):
            async with anyio.create_task_group():
                with anyio.move_on_after(1000):
                    async for token in tokens_of(engine, requests, A):
                        assert token == 0
                        assert pinned(engine.runtime)[0] == 3
                        break
                gc.collect()
                await turns()
            assert (requests[0].state, requests[0].reason) == (RequestState.ABORTED, "abandoned")
            await assert_at_rest(engine.runtime)
            assert await engine.serve(A) == 8
    assert len(found) == 1 and "was left in another task" in found[0]


async def test_streams_of_one_task_are_closed_in_any_order() -> None:
    """Two streams that one task reads in turns end first come, first go; neither is inside of the other."""
    requests: list[Request] = []
    async with scripted() as (engine, _):
        with anyio.move_on_after(1000):
            streams = [tokens_of(engine, requests, token_ids) for token_ids in (A, B)]
            for _ in range(3):
                for stream in streams:
                    await anext(stream)
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        assert [request.reason for request in requests] == ["abandoned", "abandoned"]
        await assert_at_rest(engine.runtime)


async def test_a_stream_is_closed_by_another_task() -> None:
    """Who opened it goes on; the warning tells that a generator was left to somebody else."""
    requests: list[Request] = []
    with abandonments() as found:
        async with scripted() as (engine, _):
            with anyio.move_on_after(1000):
                stream = tokens_of(engine, requests, A)
                await anext(stream)
            await in_another_task(stream.aclose)  # type: ignore[attr-defined]
            await assert_at_rest(engine.runtime)
    assert len(found) == 1


async def test_a_stream_is_read_by_several_tasks() -> None:
    """Each token by another task, to the end: that is nobody's mistake."""
    requests: list[Request] = []
    async with scripted() as (engine, _):
        stream = tokens_of(engine, requests, A)
        tokens: list[int] = []

        async def reads() -> None:
            async for token in stream:
                tokens.append(token)
                if token % 10 != 9:
                    break

        while len(tokens) < 100:
            await in_another_task(reads)
        await in_another_task(reads)
        assert requests[0].state is RequestState.DONE
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("how", ["closed", "read on"])
async def test_a_stream_outlives_the_runtime(how: str) -> None:
    """A stream that is open when the runtime closes is aborted then; reading on raises, closing it does nothing."""
    requests: list[Request] = []
    async with scripted() as (engine, _):
        stream = tokens_of(engine, requests, A)
        await anext(stream)
    assert requests[0].reason == "runtime_closed"
    engine.runtime.check_integrity()
    if how == "read on":
        with pytest.raises(RuntimeClosed):
            await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_cancelling_a_suspended_stream_cancels_nobody_else() -> None:
    """Between two tokens its task is somebody else's: the pins go at once, the reader's own wait goes on, and the
    stream is over when it is read next."""
    requests: list[Request] = []
    async with scripted() as (engine, _):
        other = tokens_of(engine, [], B)
        stream = tokens_of(engine, requests, A, request_id="streamed")
        assert [await anext(stream), await anext(other)] == [0, 0]
        assert engine.runtime.cancel("streamed", "client_gone")
        await anyio.to_thread.run_sync(gc.collect)  # would be cancelled in the stream's place
        assert (requests[0].state, requests[0].reason) == (RequestState.ABORTED, "client_gone")
        assert pinned(engine.runtime)[0] == 3
        assert [token async for token in stream] == []
        assert await anext(other) == 1
        await other.aclose()  # type: ignore[attr-defined]
        await assert_at_rest(engine.runtime)


async def test_cancelling_a_stream_that_waits() -> None:
    """A wait of the request's own is ended by `RequestAborted`, which its block swallows."""
    seen: list[BaseException] = []

    async def waits(engine: Engine) -> AsyncIterator[int]:
        async with engine.runtime.request(A, "waits") as request:
            try:
                await request.allocate()
            except RequestAborted as error:
                seen.append(error)
                raise
            yield 1

    async with scripted(4) as (engine, _), engine.runtime.request(B) as holder:
        await holder.allocate(16)

        async def reads() -> None:
            assert [token async for token in waits(engine)] == []

        async with anyio.create_task_group() as group:
            group.start_soon(reads)
            await turns()
            assert engine.runtime.statistics().num_waiting == 1
            engine.runtime.cancel("waits", "made_way")
        assert isinstance(seen[0], RequestAborted)
        assert (seen[0].request_id, seen[0].reason) == ("waits", "made_way")
        assert engine.runtime.statistics().num_requests == 1
    engine.runtime.check_integrity()


async def test_a_stream_lets_other_errors_through() -> None:
    """The block swallows what `cancel` made it raise, and nothing else: not the abort of another request."""

    async def fails(engine: Engine, error: Exception) -> AsyncIterator[int]:
        async with engine.runtime.request(A, "fails") as request:
            request.cancel("first")
            yield 1
            raise error

    async with scripted() as (engine, _):
        for error in (ValueError("ours"), RequestAborted("fails", "first")):
            with pytest.raises(type(error)) as raised:
                assert [token async for token in fails(engine, error)]
            assert raised.value is error
        await assert_at_rest(engine.runtime)


@in_time_that_jumps
async def test_the_deadline_of_a_suspended_stream() -> None:
    """A client that reads too slowly: the pins go in time, and what the reader is doing then is not cancelled."""
    requests: list[Request] = []
    async with scripted() as (engine, _):
        stream = tokens_of(engine, requests, A, deadline_s=5.0)
        assert await anext(stream) == 0
        began = anyio.current_time()
        await anyio.sleep(4.0)
        assert await anext(stream) == 1
        await anyio.sleep(4.0)
        assert anyio.current_time() - began >= 8.0
        assert (requests[0].state, requests[0].reason) == (RequestState.ABORTED, "deadline")
        await assert_at_rest(engine.runtime)
        assert [token async for token in stream] == []


@in_time_that_jumps
async def test_a_deadline_ends_with_its_request() -> None:
    """A stream that is over in time is not aborted later, nor is one whose deadline is never."""
    requests: list[Request] = []
    async with scripted() as (engine, _):
        for deadline_s in (5.0, 1e300, float("inf")):
            async with aclosing(tokens_of(engine, requests, A, deadline_s=deadline_s)) as stream:  # type: ignore[type-var]
                assert await anext(stream) == 0
            await anyio.sleep(10.0)
        assert {request.reason for request in requests} == {"abandoned"}
        await assert_at_rest(engine.runtime)


@in_time_that_jumps
@pytest.mark.parametrize("how", ["left", "dropped"])
async def test_the_deadline_of_a_block_left_by_hand(how: str) -> None:
    """Entered without `async with`, and left by another task or by nobody: its deadline cancels nobody any more."""
    with abandonments() as found:
        async with scripted() as (engine, _):

            async def enters() -> None:
                request = engine.runtime.request(A, deadline_s=5.0)
                await request.__aenter__()
                if how == "left":
                    await in_another_task(partial(leave, request))
                del request
                gc.collect()
                await anyio.sleep(10.0)
                over.append(True)

            over: list[bool] = []
            if sniffio.current_async_library() == "asyncio":
                await asyncio.create_task(enters())
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(enters)
            assert over == [True]
            await assert_at_rest(engine.runtime)
    assert len(found) == 1


async def leave(request: Request) -> None:
    await request.__aexit__(None, None, None)


async def test_cancelled_before_it_is_entered() -> None:
    """A caller that enters it finds that out at the first use, and the block is skipped from there."""

    async def streams(request: Request) -> AsyncIterator[int]:
        async with request:
            yield 1
            request.allocate_nowait()
            yield 2

    async with scripted() as (engine, _):
        request = engine.runtime.request(A)
        request.cancel("changed_my_mind")
        assert [token async for token in streams(request)] == [1]
        assert (request.state, request.reason) == (RequestState.ABORTED, "changed_my_mind")
        await assert_at_rest(engine.runtime)


@asynccontextmanager
async def request_of(engine: Engine, token_ids: list[int]) -> AsyncIterator[Request]:
    async with engine.runtime.request(token_ids) as request:
        yield request


@asynccontextmanager
async def request_on_a_stack(engine: Engine, token_ids: list[int]) -> AsyncIterator[Request]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(request_of(engine, token_ids))


@pytest.mark.parametrize("made", [request_of, request_on_a_stack])
async def test_a_context_manager_is_no_stream(made: Callable[..., Any]) -> None:
    """A request in a context manager of one's own is cancelled wherever its block waits; in a stream, it is not."""
    async with scripted() as (engine, _):
        requests: list[Request] = []

        async def waits() -> None:
            async with made(engine, A) as request:
                requests.append(request)
                await anyio.sleep_forever()

        async def streams() -> AsyncIterator[int]:
            async with made(engine, A) as request:
                requests.append(request)
                yield 1
                request.allocate_nowait()

        async with anyio.create_task_group() as group:
            group.start_soon(waits)
            await turns()
            requests[0].cancel("enough")
        stream = streams()
        assert await anext(stream) == 1
        requests[1].cancel("enough")
        await turns()
        assert [token async for token in stream] == []
        assert [request.reason for request in requests] == ["enough", "enough"]
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_cancelled_in_another_thread(is_stream: bool) -> None:
    """`cancel` may be called in any thread: it is done at the loop's next turn, in a block of either kind."""
    async with scripted() as (engine, _):
        request = engine.runtime.request(A)

        async def tokens() -> AsyncIterator[int]:
            async with request:
                request.allocate_nowait()
                yield 0
                while request.block_ids:
                    await anyio.lowlevel.checkpoint()

        async def reads() -> None:
            if is_stream:
                assert [token async for token in tokens()] == [0]
                return
            async with request:
                await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            group.start_soon(reads)
            await turns()
            assert request.state is not RequestState.ABORTED
            await anyio.to_thread.run_sync(request.cancel, "client_gone")
        assert (request.state, request.reason) == (RequestState.ABORTED, "client_gone")
        await assert_at_rest(engine.runtime)


async def test_the_reason_is_a_text() -> None:
    """What a request is cancelled for goes into logs and metrics: anything but text is refused, and changes nothing."""
    async with scripted() as (engine, _), engine.runtime.request(A, "kept") as request:
        for reason in (None, 3, b"gone"):
            with pytest.raises(InvalidArgument, match="reason"):
                request.cancel(reason)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="reason"):
                engine.runtime.cancel("kept", reason)  # type: ignore[arg-type]
        await anyio.lowlevel.checkpoint()
        assert request.state is RequestState.PINNED
        request.allocate_nowait()

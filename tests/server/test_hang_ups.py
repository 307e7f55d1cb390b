"""Clients that hang up: their requests end at once in every state, and keep no compute, pin or place in the queue."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from http_bench import BACKENDS, GUARD_S, Bench, Caller, let_threads_run, reached, serving

pytestmark = [pytest.mark.anyio, BACKENDS]

each_form = pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])


async def wait_released(bench: Bench) -> None:
    while bench.service.engine.runtime.statistics().num_requests:
        await let_threads_run()


@each_form
async def test_a_request_ends_while_its_forward_runs(is_streamed: bool) -> None:
    """The handler returns and the request is over before the forward is; its blocks go with the forward, and no other
    forward is made for it."""
    async with serving() as bench:
        bench.model.may_end.clear()
        caller = Caller.of(bench, stream=is_streamed, max_tokens=40)
        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as clients:
                clients.start_soon(caller.call)
                await reached(bench.model.began)
                caller.has_hung_up.set()
        assert bench.service.engine.runtime.statistics().num_requests == 0
        assert bench.service.admission.num_inside == 0
        assert bench.model.num_forwards == 1
        bench.model.may_end.set()
        await bench.assert_at_rest()
        assert bench.model.num_forwards == 1
    assert caller.messages == []


@each_form
async def test_a_request_ends_while_it_waits_for_the_engine(is_streamed: bool) -> None:
    """All places of the engine are taken: a client that hangs up in the queue has never held a block."""
    async with serving() as bench:
        bench.model.may_end.clear()
        waiting = [Caller.of(bench, stream=is_streamed) for _ in range(4)]
        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as clients:
                for _ in range(16):
                    clients.start_soon(bench.complete)
                await reached(bench.model.began)
                async with anyio.create_task_group() as leavers:
                    for caller in waiting:
                        leavers.start_soon(caller.call)
                    while bench.service.engine.statistics().num_waiting < 4:
                        await let_threads_run()
                    for caller in waiting:
                        caller.has_hung_up.set()
                assert bench.service.engine.statistics().num_waiting == 0
                bench.model.may_end.set()
    assert all(caller.messages == [] for caller in waiting)


@pytest.mark.parametrize("num_passes", range(0, 60, 3))
@each_form
async def test_a_client_may_hang_up_at_any_time(is_streamed: bool, num_passes: int) -> None:
    """After any number of turns of the loop: everything of it goes, and its neighbour gets its own answer."""
    async with serving() as bench:
        alone = await bench.complete("Somebody else", max_tokens=6)
        caller = Caller.of(bench, stream=is_streamed, max_tokens=12)
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await bench.complete("Somebody else", max_tokens=6))

        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as clients:
                clients.start_soon(ask)
                clients.start_soon(caller.call)
                for _ in range(num_passes):
                    await anyio.lowlevel.checkpoint()
                caller.has_hung_up.set()
    assert answers[0]["choices"] == alone["choices"]


@pytest.mark.parametrize("num_messages", range(1, 8))
async def test_a_reader_may_stop_anywhere_in_a_stream(num_messages: int) -> None:
    """After any event: the forwards that were for it end, far below those of the whole answer."""
    async with serving() as bench:
        caller = Caller.of(bench, stream=True, max_tokens=200, ignore_eos=True)
        caller.hangs_up_after = num_messages
        with anyio.fail_after(GUARD_S):
            await caller.call()
            await bench.assert_at_rest()
    assert bench.model.num_forwards < 30
    assert len(caller.messages) < num_messages + 10


async def test_a_client_may_hang_up_before_its_body_is_complete() -> None:
    """Half a body and then nothing: no answer, no place taken, no error."""
    async with serving() as bench:
        caller = Caller.of(bench)
        whole, parts = caller.body, iter([b"{", b'"model"'])

        async def receive() -> dict[str, Any]:
            part = next(parts, None)
            if part is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": part, "more_body": True}

        caller.receive = receive  # type: ignore[method-assign]
        await caller.call()
        assert (caller.messages, bench.model.num_forwards) == ([], 0)
        assert whole


async def test_a_reader_that_stands_still_holds_no_block() -> None:
    """The answer is made and its blocks are free although nobody takes its text; what waits is the text."""
    async with serving() as bench:
        caller = Caller.of(bench, stream=True, max_tokens=12)
        goes_on = anyio.Event()
        send = caller.send

        async def stalled(message: Any) -> None:
            await goes_on.wait()
            await send(message)

        caller.send = stalled  # type: ignore[method-assign]
        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as clients:
                clients.start_soon(caller.call)
                await reached(bench.model.began)
                await wait_released(bench)
                assert bench.service.engine.runtime.statistics().device.num_pinned == 0
                assert bench.service.admission.num_inside == 1
                goes_on.set()
    assert caller.content.endswith(b"[DONE]\n\n")

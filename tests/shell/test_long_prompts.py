"""Long prompts: long work is split or moved to a thread, so that the event loop keeps running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from engine_serving import own_engine
from serving import BACKENDS, Checkpoints, assert_at_rest, at_every_checkpoint, prompt, with_bytes

from aoffload import InvalidArgument, RequestState, WrongState
from aoffload._kernel import index, tokens

pytestmark = pytest.mark.anyio

A = prompt(1, 42)
SLICE = 8
LONGEST_RUN = 12


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def everything_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aoffload._common.prefix.MAX_LIST", SLICE)
    monkeypatch.setattr("aoffload._kernel.tokens.MAX_RUN_TOKENS", LONGEST_RUN)


@pytest.fixture
def hashed_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The threads in which more than a block was hashed at once, one entry for each time."""
    threads: list[int] = []
    whole = tokens.hash_run

    def hash_run(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return whole(*arguments)

    for module in (tokens, index):
        monkeypatch.setattr(module, "hash_run", hash_run)
    return threads


async def test_others_have_turns_while_a_long_list_is_read() -> None:
    """A list is read slice by slice: somebody who only wants the loop gets it as often as there are slices."""
    async with with_bytes(24) as engine:
        num_turns = 0

        async def others() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(others)
            await anyio.lowlevel.checkpoint()
            before = num_turns
            async with engine.runtime.request(A) as request:
                assert num_turns - before >= len(A) // SLICE
                assert await engine.prefill(request, A, None) == 0
            group.cancel_scope.cancel()
        assert await engine.serve(tuple(A)) == 40
        await assert_at_rest(engine.runtime)


async def test_a_bad_id_far_behind_is_refused_by_name() -> None:
    """Whatever slice it is in, the argument is named, and nothing was admitted."""
    async with with_bytes(24) as engine:
        for bad in (-1, 2**31, 1.5, "x", None):
            with pytest.raises(InvalidArgument, match="token_ids"):
                async with engine.runtime.request([*A, bad]):  # type: ignore[list-item]
                    raise AssertionError("it was admitted")
        with pytest.raises(InvalidArgument, match="key_spans"):
            async with engine.runtime.request(A, key_spans=3):  # type: ignore[arg-type]
                raise AssertionError("it was admitted")
        await assert_at_rest(engine.runtime)


async def test_who_is_cancelled_while_reading_has_taken_nothing() -> None:
    """Before the last slice there is no request yet: no pin, no event, and the same object may be entered again."""
    async with with_bytes(24) as engine:
        request = engine.runtime.request(A)
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with request:
                raise AssertionError("it was entered")
        assert request.state is RequestState.QUEUED
        assert engine.runtime.statistics().num_requests == 0
        async with request:
            with pytest.raises(WrongState, match="entered before"):
                async with request:
                    raise AssertionError("it was entered twice")
        await assert_at_rest(engine.runtime)


@pytest.mark.pure("watches a function of the core")
async def test_what_is_long_is_hashed_by_a_thread(hashed_in: list[int]) -> None:
    """Of a long prompt that nobody has, publishing hashes nothing in the loop; and what was hashed ahead is found."""
    async with with_bytes(24) as engine:
        async with engine.runtime.request(A) as request:
            await request.allocate()
            await request.load()
            assert hashed_in
            assert threading.get_ident() not in hashed_in
            hashed_in.clear()
            engine.compute(request, A, 0)
            request.commit(len(A))
            assert not hashed_in
        hashed_in.clear()
        assert await engine.serve(A) == 40
        assert not [thread for thread in hashed_in if thread != threading.get_ident()], "a hit was hashed once more"
        await assert_at_rest(engine.runtime)


async def test_who_is_cancelled_or_late_while_reading_does_not_go_on() -> None:
    """A cancellation that comes before the block is entered is met at its first wait, and a deadline counts from the
    beginning of the reading."""
    async with with_bytes(24) as engine:
        for options in ({}, {"deadline_s": 0.0}):
            request = engine.runtime.request(A, **options)
            if not options:
                request.cancel("client_gone")
            went_on = False
            async with request:
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
                went_on = True
            assert not went_on
            assert (request.state, request.reason) == (RequestState.ABORTED, "deadline" if options else "client_gone")
        await assert_at_rest(engine.runtime)


async def test_hashing_waits_for_no_thread_of_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every thread of the default pool waits for a request, the request still gets one to hash in."""
    async with with_bytes(24) as engine:
        limiter = anyio.to_thread.current_default_thread_limiter()
        monkeypatch.setattr(limiter, "total_tokens", 1)

        def endpoint() -> int:
            return anyio.from_thread.run(engine.serve, A)

        with anyio.fail_after(60):
            assert await anyio.to_thread.run_sync(endpoint) == 0
        await assert_at_rest(engine.runtime)


async def test_an_engine_that_is_cancelled_while_it_loads_a_long_prompt() -> None:
    """At each checkpoint, also while a thread hashes what follows the hit: the blocks are the engine's again, and the
    next request has the right bytes."""

    async def scenario(k: int) -> bool:
        async with own_engine() as engine:
            await engine.stored(A[:17])
            with anyio.CancelScope() as scope:
                steps = Checkpoints(k, scope.cancel)
                await steps.run(engine.serve(A))
            assert await engine.serve(A) >= 16
            await engine.assert_at_rest()
            return steps.reached

    assert await at_every_checkpoint(scenario) >= 9

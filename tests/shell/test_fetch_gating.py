"""A fetch competes with computing: one that would be slower is not begun, one that hangs is not waited for longer."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from clocks import leap, leaping_backend
from serving import GUARD_S, prompt, turns

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from disk_serving import Hanging, assert_quiet, of_slab, on_the_disk_only, simulated, with_disk
from hanging_calls import goes_on_after, serving_until

from aoffload._transfer.rates import FRESH_S

pytestmark = pytest.mark.anyio

A, B = prompt(1, 17), prompt(2, 17)
LONG = {"load_timeout_s": 1e4, "transfer_timeout_s": 1e4, "store_timeout_s": 1e4}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


async def test_a_disk_that_hangs_is_waited_for_as_long_as_computing_takes() -> None:
    """The request goes on within 50 ms of that time, not after `fetch_timeout_s`."""
    disk = simulated()
    async with with_disk(disk, prefill_tokens_per_s=0.16, **LONG) as engine:  # 100 s for 16 tokens
        await on_the_disk_only(engine, A)
        async with serving_until(Hanging(disk, of_slab("read")), engine, A) as found:
            await goes_on_after(100.0, found)
        assert found == [0]
        await assert_quiet(engine.runtime)


async def test_what_hangs_keeps_the_next_request_no_time() -> None:
    """While the first one waits, the disk is seen to be slow: others compute at once."""
    disk = simulated()
    async with with_disk(disk, num_blocks=16, prefill_tokens_per_s=0.16, **LONG) as engine:
        await on_the_disk_only(engine, A, B)
        hanging = Hanging(disk, of_slab("read"))
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(engine.serve, A)
                await hanging.wait_for()
                leap(90.0)
                with anyio.fail_after(GUARD_S):
                    assert await engine.serve(B) == 0
                assert engine.runtime.statistics().num_fetches_declined == 1
                leap(10.05)
        finally:
            hanging.resume()
        await assert_quiet(engine.runtime)


async def test_a_slow_disk_is_not_fetched_from() -> None:
    """It is left alone until its measurement is old; then one fetch measures it again."""
    disk = simulated()
    async with with_disk(disk, prefill_tokens_per_s=1000.0, **LONG) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A, B)
        hanging = Hanging(disk, of_slab("read"))
        try:
            pending = runtime.fetches.fetch(A)
            await hanging.wait_for()
            leap(100.0)
        finally:
            hanging.resume()
        assert await pending.wait() == 16
        num_calls = disk.num_calls
        async with runtime.request(B) as request:
            assert request.match.num_lower_tokens == 16
            await request.allocate()
            assert request.match.num_tokens == 0
        assert disk.num_calls == num_calls and runtime.statistics().num_fetches_declined == 1
        leap(FRESH_S)
        async with runtime.request(B) as request:
            await request.fetch()
        await runtime.flush()
        assert disk.num_calls > num_calls and runtime.statistics().num_fetches_declined == 1
        await assert_quiet(runtime)


async def test_requests_of_one_prompt_are_not_kept_apart_by_the_gate() -> None:
    """What one has fetched under way costs the next one nothing more."""
    disk = simulated()
    async with with_disk(disk, num_blocks=16, prefill_tokens_per_s=0.16, **LONG) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A)
        assert runtime.ledger.fetches.num_blocks(runtime._session.prefix("prefix", A, {})) == 4
        pending = runtime.fetches.fetch(A)
        assert runtime.ledger.fetches.num_blocks(runtime._session.prefix("prefix", A, {})) == 0
        assert await pending.wait() == 16
        assert runtime.ledger.fetches.num_blocks(runtime._session.prefix("prefix", A, {})) == 0
        await assert_quiet(runtime)


async def test_the_speed_of_computing_is_measured_in_steps() -> None:
    """From the begin of a step to its commit; what decodes does not count."""
    async with with_disk(simulated(), prefill_tokens_per_s=None) as engine:
        speed = engine.runtime._session.speed
        assert speed is not None and speed.tokens_per_s is None
        async with engine.runtime.request(A) as request:
            await request.allocate(21)
            await request.load()
            with engine.runtime.step([request]):
                engine.compute(request, A, 0)
                leap(100.0)
            request.commit(17)
            assert speed.tokens_per_s == pytest.approx(0.17, rel=0.3)
            before = speed.tokens_per_s
            with engine.runtime.step([request]):
                leap(100.0)
            request.commit(18, [7])
        assert speed.tokens_per_s == before and not speed._steps
        await assert_quiet(engine.runtime)


async def test_a_request_that_fetches_keeps_its_place_in_line() -> None:
    """A later request waits after it, also if it asked for room while the first one fetched."""
    disk = simulated()
    async with with_disk(disk, num_blocks=8, **LONG) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A)
        hanging = Hanging(disk, of_slab("read"))
        order: list[str] = []

        async def serve(name: str, token_ids: list[int]) -> None:
            async with runtime.request(token_ids, request_id=name) as request:
                if name == "second":
                    await hanging.wait_for()
                await request.allocate()
                order.append(name)
                await request.load()

        try:
            async with anyio.create_task_group() as group:
                async with runtime.request(prompt(3, 17)) as holder:
                    await holder.allocate(32)
                    group.start_soon(serve, "first", A)
                    while "first" not in runtime._session.requests:
                        await turns(1)
                    group.start_soon(serve, "second", prompt(4, 17))
                    while not runtime.ledger.admission.queue.allocating:
                        await turns(1)
                    hanging.resume()
                    while len(runtime.ledger.admission.queue.allocating) < 2:
                        await turns(1)
                    assert not order
        finally:
            hanging.resume()
        assert order == ["first", "second"]
        await assert_quiet(runtime)

"""Pins, prefetches and demotions as tasks use them: scopes that end, however they end."""

from __future__ import annotations

import gc
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import anyio
import pytest
import structlog
from clocks import JUMPING, jumping_backend
from serving import (
    BACKENDS,
    Checkpoints,
    Engine,
    assert_at_rest,
    at_every_checkpoint,
    on_the_host_only,
    pinned,
    prompt,
    scripted,
    turns,
    with_bytes,
)

from aoffload import InvalidArgument, OutOfBlocks, RuntimeClosed, WrongState, WrongThread
from aoffload._kernel.states import Direction
from aoffload.ledger import PinScope, PinState

pytestmark = pytest.mark.anyio

A, B, C = (prompt(seed, 9) for seed in range(1, 4))
TIMES: dict[str, Any] = {
    "load_timeout_s": 30.0,
    "transfer_timeout_s": 120.0,
    "store_timeout_s": 120.0,
    "close_timeout_s": 10.0,
}


@pytest.fixture(params=JUMPING)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return jumping_backend(request.param) if isinstance(request.param, str) else request.param


with_threads = pytest.mark.parametrize("anyio_backend", BACKENDS, indirect=True)
"""Time passes for threads that copy."""


async def storm(engine: Engine, num_prompts: int = 12) -> None:
    """Others come and go, more of them than both tiers can keep."""
    for seed in range(100, 100 + num_prompts):
        await engine.serve(prompt(seed, 9))
        await engine.runtime.flush()


async def on_the_device_only(engine: Engine, transport: Any, token_ids: list[int]) -> None:
    transport.refuse_next()
    await engine.serve(token_ids)
    await engine.runtime.flush()
    assert engine.runtime.lookup(token_ids).num_host_tokens == 0


# -- pins ---------------------------------------------------------------------------------------------------------


@with_threads
async def test_a_pinned_prefix_outlives_a_storm() -> None:
    """Inside of the block a prompt keeps hitting, with its own bytes; after it, it is evictable at once."""
    async with with_bytes(12, num_host_blocks=12) as engine:
        runtime = engine.runtime
        await engine.serve(A, salt="tenant")
        await runtime.flush()
        with runtime.pins.hold(A, ttl_s=60, cache_salt="tenant") as pin:
            assert (pin.state, pin.match.num_device_tokens) == (PinState.HELD, 8)
            await storm(engine)
            assert await engine.serve(A, salt="tenant") == 8
            assert pinned(runtime) == (2, 2)
        assert (pin.state, pin.has_lapsed) == (PinState.RELEASED, False)
        await assert_at_rest(runtime)
        await storm(engine)
        assert await engine.serve(A, salt="tenant") == 0


async def test_a_pin_lapses() -> None:
    """After `ttl_s` it has ended by itself, and says so; leaving its block changes nothing any more."""
    async with scripted(**TIMES) as (engine, _):
        runtime = engine.runtime
        for token_ids in (A, B, C):
            await engine.serve(token_ids)
        await runtime.flush()
        began = anyio.current_time()
        with runtime.pins.hold(A, ttl_s=300) as long, runtime.pins.hold(B, ttl_s=60) as short:
            await anyio.sleep_until(began + 59)
            with runtime.pins.hold(C, ttl_s=30.5) as last:
                assert pinned(runtime) == (6, 6)
                await anyio.sleep_until(began + 61)
                assert (long.has_lapsed, short.has_lapsed, last.has_lapsed) == (False, True, False)
                assert pinned(runtime) == (4, 4)
                await anyio.sleep_until(began + 91)
                assert (last.state, last.has_lapsed) == (PinState.LAPSED, True)
                assert pinned(runtime) == (2, 2)
            runtime.check_integrity()
            await anyio.sleep_until(began + 299)
            assert not long.has_lapsed
        assert (long.state, short.state) == (PinState.RELEASED, PinState.LAPSED)
        await assert_at_rest(runtime)


async def test_a_pin_lapses_in_time_whatever_copies_do() -> None:
    """One worker watches both: a copy that hangs moves no pin's deadline, and a pin no copy's."""
    async with scripted(**TIMES) as (engine, transport):
        runtime = engine.runtime
        await engine.serve(A)
        await runtime.flush()
        transport.auto = False
        began = anyio.current_time()
        with runtime.pins.hold(A, ttl_s=50) as first:
            await engine.serve(B)  # its store hangs until 120
            with runtime.pins.hold(A, ttl_s=200) as second:
                await anyio.sleep_until(began + 51)
                assert first.has_lapsed
                assert runtime.statistics().host.num_quarantined == 0
                await anyio.sleep_until(began + 121)
                assert runtime.statistics().host.num_quarantined == 2
                assert not second.has_lapsed
                await anyio.sleep_until(began + 201)
                assert second.has_lapsed
        assert runtime.statistics().num_pins == 0


async def test_nobody_is_woken_for_a_pin_before_its_time() -> None:
    """Its deadline is the only time at which the worker has to look at it: no polling."""
    async with scripted() as (engine, _):
        runtime = engine.runtime
        await engine.serve(A)
        await runtime.flush()
        await anyio.sleep(runtime.config.transfer_timeout_s + 1)  # its store might have been late: that is looked at
        looks: list[float] = []
        lapse = runtime.ledger.lapse
        runtime.ledger.lapse = lambda now: looks.append(now) or lapse(now)  # type: ignore[func-returns-value, method-assign]
        began = anyio.current_time()
        with runtime.pins.hold(A, ttl_s=1000) as pin:
            await anyio.sleep(2000)
        assert pin.has_lapsed
        assert [round(now - began) for now in looks] == [1000]


async def test_a_pin_cancelled_at_every_checkpoint() -> None:
    """Wherever its task is cancelled, nothing stays pinned."""

    async def scenario(at: int) -> bool:
        async with scripted() as (engine, _):
            runtime = engine.runtime
            await engine.serve(A)
            await runtime.flush()
            scope = anyio.CancelScope()
            points = Checkpoints(at, scope.cancel)

            async def keeps() -> None:
                with scope:
                    await anyio.lowlevel.checkpoint()
                    with runtime.pins.hold(A, ttl_s=60) as pin:
                        await anyio.lowlevel.checkpoint()
                        await engine.serve(B)
                        await anyio.sleep(1)
                        assert pin.match.num_tokens == 8
                        await engine.serve([*A, 1])

            await points.run(keeps())
            await assert_at_rest(runtime)
            assert runtime.statistics().num_pins == 0
            return points.reached

    assert await at_every_checkpoint(scenario) > 2


async def test_a_pin_is_entered_once() -> None:
    """Again is refused, inside and after; nothing more is pinned."""
    async with scripted() as (engine, _):
        await engine.serve(A)
        await engine.runtime.flush()
        with engine.runtime.pins.hold(A, ttl_s=60) as pin:
            with pytest.raises(WrongState, match="entered before"):
                pin.__enter__()
            assert pinned(engine.runtime) == (2, 2)
        with pytest.raises(WrongState, match="entered before"):
            pin.__enter__()
        never = engine.runtime.pins.hold(A, ttl_s=60)
        assert (never.state, never.match.num_tokens, never.has_lapsed) == (PinState.NEW, 0, False)
        assert repr(never) == "<PinScope NEW 0 tokens>"
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("bad", [0, -1, None, "60", math.nan, math.inf, True, 1e10, 10**400, [60]], ids=repr)
async def test_a_bad_time_to_live(bad: Any) -> None:
    """Refused by name."""
    async with scripted() as (engine, _):
        with pytest.raises(InvalidArgument, match="ttl_s") as refused:
            engine.runtime.pins.hold(A, bad)
        assert refused.value.argument == "ttl_s"


@pytest.mark.parametrize("call", ["pins.hold", "transfers.prefetch", "transfers.demote"])
async def test_a_bad_identity_is_named(call: str) -> None:
    """Salts, adapters and spans are checked as those of a request are."""
    async with scripted() as (engine, _):
        function: Any = attrgetter(call)(engine.runtime)
        args = (A, 60) if call == "pins.hold" else (A,)
        for name, bad in (("cache_salt", 7), ("adapter_key", 1.5), ("key_spans", 3)):
            with pytest.raises(InvalidArgument, match=name):
                function(*args, **{name: bad})
        with pytest.raises(TypeError):
            function(*args, deadline_s=3)
        await assert_at_rest(engine.runtime)


async def test_a_pin_that_keeps_too_much_is_refused() -> None:
    """Above the share of all pins: a typed error, nothing pinned, and the scope may be left to itself."""
    async with scripted(8, max_pinned_share=0.25) as (engine, _):
        for token_ids in (A, B):
            await engine.serve(token_ids)
        await engine.runtime.flush()
        with engine.runtime.pins.hold(A, ttl_s=60):
            with pytest.raises(OutOfBlocks) as refused, engine.runtime.pins.hold(B, ttl_s=60):
                raise AssertionError("entered")
            assert refused.value.retryable
            assert pinned(engine.runtime) == (2, 2)
        await assert_at_rest(engine.runtime)


async def test_a_request_is_never_starved_by_pins() -> None:
    """A request that fits the pool is served at once, though pins hold it: even its own task's."""
    async with scripted(8, max_pinned_share=1.0, **TIMES) as (engine, _):
        for token_ids in (A, B):
            await engine.serve(token_ids)
        began = anyio.current_time()
        with engine.runtime.pins.hold(A, ttl_s=3600) as one, engine.runtime.pins.hold(B, ttl_s=7200) as other:
            assert await engine.serve(prompt(9, 24)) == 0
            assert (one.state, other.state) == (PinState.YIELDED, PinState.HELD)
            assert await engine.serve(prompt(10, 32)) == 0
            assert other.state is PinState.YIELDED
        assert anyio.current_time() == began
        await assert_at_rest(engine.runtime)


async def test_a_pin_left_elsewhere_or_never() -> None:
    """A pin that is abandoned warns, and the worker releases it."""
    async with scripted() as (engine, _):
        await engine.serve(A)
        await engine.runtime.flush()

        def abandons() -> None:
            engine.runtime.pins.hold(A, ttl_s=60).__enter__()
            gc.collect()

        with pytest.warns(ResourceWarning, match="PinScope HELD 8 tokens> was abandoned"):
            abandons()
        await turns()
        await assert_at_rest(engine.runtime)
        pin = engine.runtime.pins.hold(A, ttl_s=60)
        with pytest.raises(WrongThread):
            await anyio.to_thread.run_sync(pin.__enter__)


async def test_without_a_worker_no_pin_lasts() -> None:
    """Nobody would look at its deadline: it is dropped, at once, and says so."""
    async with scripted() as (engine, _):
        await engine.serve(A)
        await engine.runtime.flush()
        with engine.runtime.pins.hold(A, ttl_s=60) as before:
            engine.runtime.worker._scope.cancel()
            await turns()
            assert before.state is PinState.DROPPED
            with engine.runtime.pins.hold(A, ttl_s=60) as after:
                assert after.state is PinState.DROPPED
        assert pinned(engine.runtime) == (0, 0)


# -- prefetches ---------------------------------------------------------------------------------------------------


@with_threads
async def test_a_prefetch_ahead_of_a_request() -> None:
    """What was in host memory is on the device, with its bytes; the request loads nothing."""
    async with with_bytes(16, max_prefetch_share=1.0) as engine:
        runtime = engine.runtime
        await on_the_host_only(engine, A)
        assert runtime.lookup(A).num_host_tokens == 8
        assert await runtime.transfers.prefetch(A).wait() == 8
        await assert_at_rest(runtime)
        loads = runtime.statistics().transfers.num_loads
        assert await engine.serve(A) == 8
        assert runtime.statistics().transfers.num_loads == loads
        assert await runtime.transfers.prefetch(A).wait() == 8  # there already
        assert await runtime.transfers.prefetch(B).wait() == 0
        assert await runtime.transfers.prefetch(A, cache_salt="other").wait() == 0


async def test_two_prefetches_and_a_request_share_a_load() -> None:
    """A request for the same blocks waits for the same job; one may leave."""
    async with scripted(max_prefetch_share=1.0) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        number = len(transport.launched)
        found: list[int] = []
        first = engine.runtime.transfers.prefetch(A)

        async def fetches() -> None:
            found.append(await engine.runtime.transfers.prefetch(A).wait())

        async def serves() -> None:
            found.append(await engine.serve(A))

        async with anyio.create_task_group() as group:
            group.start_soon(fetches)
            group.start_soon(serves)
            await turns()
            assert len(transport.launched) == number + 1
            first.cancel()
            transport.land_all()
            transport.auto = True
        assert found == [8, 8]
        assert first.is_over
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("max_jobs", [1, 4])
async def test_a_prefetch_cancelled_at_every_checkpoint(max_jobs: int) -> None:
    """Nothing stays pinned, nothing stays taken: the next prefetch has the whole budget."""

    async def scenario(at: int) -> bool:
        async with scripted(max_prefetch_share=0.125, max_job_bytes=1, max_jobs_in_flight=max_jobs) as (
            engine,
            transport,
        ):
            runtime = engine.runtime
            await on_the_host_only(engine, A, B)
            transport.auto = False
            scope = anyio.CancelScope()
            points = Checkpoints(at, scope.cancel)

            async def fetches() -> None:
                with scope, runtime.transfers.prefetch(A) as pending:
                    assert await pending.wait() == 8

            async with anyio.create_task_group() as group:
                group.start_soon(points.run, fetches())
                await turns()
                runtime.check_integrity()
                transport.land_all()
                await turns()
                transport.auto = True
                transport.land_all()
            await assert_at_rest(runtime)
            assert await runtime.transfers.prefetch(B).wait() == 8
            return points.reached

    assert await at_every_checkpoint(scenario) >= 1


@pytest.mark.parametrize("ends", ["fails", "is lost", "is refused", "is corrupt", "hangs"])
async def test_a_prefetch_whose_copy_fails(ends: str) -> None:
    """It never raises: what is on the device is told, the budget is back, the prompt is still in the host."""
    async with scripted(max_prefetch_share=0.125, **TIMES) as (engine, transport):
        runtime = engine.runtime
        await on_the_host_only(engine, A, B)
        transport.auto = False
        if ends == "is refused":
            transport.refuse_next()
        pending = runtime.transfers.prefetch(A)
        jobs = list(transport.in_flight)
        {
            "fails": lambda: transport.fail(jobs[0], 1),
            "is lost": lambda: transport.lose(jobs[0]),
            "is corrupt": lambda: transport.corrupt(jobs[0], 1),
        }.get(ends, lambda: None)()
        assert await pending.wait() == (4 if ends in ("fails", "is corrupt") else 0)
        assert pinned(runtime) == (0, 0)
        runtime.check_integrity()
        if ends in ("is lost", "hangs"):
            transport.land(jobs[0])
            await turns()
        transport.auto = True
        assert await runtime.transfers.prefetch(B).wait() == 8
        await assert_at_rest(runtime)


async def test_a_prefetch_under_a_full_device() -> None:
    """No room that nobody holds: nothing changes, and nobody waits."""
    async with scripted(8, max_prefetch_share=1.0) as (engine, transport):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(prompt(9, 32)) as request:
            await request.allocate()
            before, launched = engine.runtime.statistics(), len(transport.launched)
            assert await engine.runtime.transfers.prefetch(A).wait() == 0
            assert (engine.runtime.statistics(), len(transport.launched)) == (before, launched)


# -- demotions ----------------------------------------------------------------------------------------------------


@with_threads
async def test_a_prompt_sent_away_comes_back() -> None:
    """Its blocks are free, its bytes are in the host; how many blocks that gave is told."""
    async with with_bytes(16) as engine:
        runtime = engine.runtime
        await engine.serve(A)
        assert await runtime.transfers.demote(A).wait() in (0, 2)  # perhaps its store is reading them
        await runtime.flush()
        await runtime.transfers.demote(A).wait()
        assert (runtime.statistics().device.num_cached, runtime.lookup(A).num_host_tokens) == (0, 8)
        assert await engine.serve(A) == 8
        await runtime.flush()
        assert await runtime.transfers.demote(A, cache_salt="other").wait() == 0
        assert await runtime.transfers.demote(A).wait() == 2


async def test_a_demotion_stores_first() -> None:
    """What the host lacks is stored, and the device keeps it until that has landed."""
    async with scripted() as (engine, transport):
        runtime = engine.runtime
        await on_the_device_only(engine, transport, A)
        transport.auto = False
        pending = runtime.transfers.demote(A)
        (job,) = transport.in_flight.values()
        assert (job.plan.direction, pending.is_over) == (Direction.STORE, False)
        assert runtime.lookup(A).num_device_tokens == 8
        transport.land_all()
        assert await pending.wait() == 2
        assert runtime.lookup(A).num_host_tokens == 8
        await assert_at_rest(runtime)


@with_threads
async def test_a_demotion_with_readers() -> None:
    """A live request keeps its blocks, and its bytes; after its block they may go."""
    async with with_bytes(16) as engine:
        runtime = engine.runtime
        await engine.serve(A)
        await runtime.flush()
        async with runtime.request([*A, 7]) as request:
            await request.allocate()
            assert await runtime.transfers.demote(A).wait() == 0
            assert await request.load() == 8
            engine.check(request, A, 8)
        assert await runtime.transfers.demote(A).wait() == 2


async def test_a_demotion_cancelled_at_every_checkpoint() -> None:
    """Its store goes on; what was cached is cached."""

    async def scenario(at: int) -> bool:
        async with scripted() as (engine, transport):
            runtime = engine.runtime
            await on_the_device_only(engine, transport, A)
            transport.auto = False
            scope = anyio.CancelScope()
            points = Checkpoints(at, scope.cancel)

            async def demotes() -> None:
                with scope, runtime.transfers.demote(A) as pending:
                    assert await pending.wait() == 2

            async with anyio.create_task_group() as group:
                group.start_soon(points.run, demotes())
                await turns()
                transport.land_all()
            await assert_at_rest(runtime)
            assert runtime.lookup(A).num_tokens == 8
            return points.reached

    assert await at_every_checkpoint(scenario) >= 1


async def test_a_cancelled_wait_ends_only_the_wait() -> None:
    """The prefetch goes on, and may be waited for again. A task that is cancelled gets its cancellation in `wait`, even
    if the prefetch is over."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        pending = engine.runtime.transfers.prefetch(A)

        async def is_cancelled() -> bool:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await pending.wait()
            return scope.cancelled_caught

        assert await is_cancelled() and not pending.is_over
        transport.land_all()
        transport.auto = True
        assert await pending.wait() == 8
        assert await is_cancelled()
        await assert_at_rest(engine.runtime)


# -- all three in flight ------------------------------------------------------------------------------------------


async def begin_all(engine: Engine, transport: Any) -> tuple[PinScope, Any, Any]:
    await on_the_host_only(engine, A)
    await engine.serve(B)
    await engine.runtime.flush()
    await on_the_device_only(engine, transport, C)
    transport.auto = False
    pin = engine.runtime.pins.hold(B, ttl_s=3600).__enter__()
    return pin, engine.runtime.transfers.prefetch(A), engine.runtime.transfers.demote(C)


async def test_a_reset_with_all_three_in_flight() -> None:
    """Late landings publish nothing; what was asked for is over, and everything is free."""
    async with scripted(max_prefetch_share=1.0) as (engine, transport):
        runtime = engine.runtime
        pin, prefetch, demotion = await begin_all(engine, transport)
        async with anyio.create_task_group() as group:
            group.start_soon(runtime.reset)
            await turns()
            assert pin.state is PinState.DROPPED
            runtime.check_integrity()
            transport.land_all()
            transport.auto = True
        assert (await prefetch.wait(), await demotion.wait()) == (0, 0)
        assert all(runtime.lookup(token_ids).num_tokens == 0 for token_ids in (A, B, C))
        statistics = runtime.statistics()
        assert (statistics.device.num_free, statistics.host.num_free) == (16, 16)
        pin.__exit__(None, None, None)
        await assert_at_rest(runtime)


@pytest.mark.parametrize("lands", [True, False])
async def test_a_close_with_all_three_in_flight(lands: bool) -> None:
    """A waiting call hears that the runtime is closed; nothing stays pinned, and leaving a pin's block is legal."""
    heard: list[str] = []

    async def hears(wait: Callable[[], Awaitable[Any]]) -> None:
        try:
            await wait()
        except RuntimeClosed:
            heard.append("closed")

    async with anyio.create_task_group() as group:
        async with scripted(max_prefetch_share=1.0, **TIMES) as (engine, transport):
            pin, prefetch, demotion = await begin_all(engine, transport)
            group.start_soon(hears, prefetch.wait)
            group.start_soon(hears, demotion.wait)
            await turns()
            if lands:
                group.start_soon(land_later, transport)
    assert heard == ["closed", "closed"]
    assert pin.state is PinState.DROPPED
    pin.__exit__(None, None, None)
    assert pinned(engine.runtime) == (0, 0)
    engine.runtime.check_integrity()
    for call in (prefetch.cancel, pin.__enter__):
        with pytest.raises(RuntimeClosed):
            call()


async def land_later(transport: Any) -> None:
    await anyio.sleep(1)
    transport.land_all()


# -- the log ------------------------------------------------------------------------------------------------------


async def test_what_the_log_says() -> None:
    """Every end of a pin, a prefetch and a demotion is an event; the jobs carry its name."""
    lines: list[dict[str, Any]] = []

    def keep(_: Any, __: str, event: dict[str, Any]) -> Any:
        lines.append(event)
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(0))
    async with scripted(logger=logger, max_prefetch_share=1.0) as (engine, _):
        runtime = engine.runtime
        await on_the_host_only(engine, A)
        await runtime.transfers.prefetch(A).wait()
        with runtime.pins.hold(A, ttl_s=1):
            await anyio.sleep(2)
        with suppress(ValueError), runtime.pins.hold(A, ttl_s=1):
            raise ValueError
        await runtime.transfers.demote(A).wait()
    about = [line for line in lines if line["event"].split("_")[0] in ("pin", "prefetch", "demotion")]
    assert about == [
        {"event": "prefetch_moving", "request_id": "prefetch-1", "num_blocks": 2, "num_tokens": 0},
        {"event": "prefetch_done", "request_id": "prefetch-1", "num_blocks": 2, "num_tokens": 8},
        {"event": "pin_held", "pin_id": 1, "num_tokens": 8},
        {"event": "pin_lapsed", "pin_id": 1, "num_tokens": 8},
        {"event": "pin_held", "pin_id": 2, "num_tokens": 8},
        {"event": "pin_released", "pin_id": 2, "num_tokens": 8},
        {"event": "demotion_done", "request_id": "demotion-2", "num_blocks": 2},
    ]
    loads = [line["request_id"] for line in lines if line["event"] == "job_launched" and line["direction"] == "load"]
    assert loads == ["prefetch-1"]

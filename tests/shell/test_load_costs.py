"""Load or compute: the loads of a runtime's requests, the reported decisions, and the estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from clocks import leap, leaping_backend
from engine_serving import own_engine
from scripted import ScriptedTransport
from serving import Engine, assert_at_rest, loading, on_the_host_only, prompt, scripted
from structlog.testing import capture_logs

from aoffload import InvalidArgument, RequestState
from aoffload.ledger import LoadOffer

pytestmark = pytest.mark.anyio

A, B = prompt(1, 17), prompt(2, 17)
FAST, SLOW = 1e9, 1e-3
"""Tokens computed a second: much faster than a copy that takes a moment, and much slower."""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


@attrs.define(eq=False)
class FixedChoice:
    """A choice that loads so many units, and keeps what it was offered."""

    num_units: Any
    offers: list[LoadOffer] = attrs.field(factory=list)

    def stop(self, offer: LoadOffer) -> int:
        self.offers.append(offer)
        return self.num_units  # type: ignore[no-any-return]


async def a_copy_takes(engine: Engine, transport: ScriptedTransport, seconds: float) -> None:
    """Measure the link: a load of the whole prompt that takes so long."""
    transport.auto = False
    async with engine.runtime.request(B) as request:
        await request.allocate()
        pending = request.load_nowait()
        leap(seconds)
        transport.land_all()
        assert await pending.wait() == 16
    transport.auto = True
    await engine.runtime.flush()


async def test_a_slow_link_is_not_loaded_from() -> None:
    """The request computes what it hit, and is told so; the count and the event have it."""
    with capture_logs() as events:
        async with scripted(load_choice="cost", prefill_tokens_per_s=100.0) as (engine, transport):
            await on_the_host_only(engine, A, B)
            await a_copy_takes(engine, transport, 4.0)
            assert await engine.serve(A) == 0
            statistics = engine.runtime.statistics()
            assert statistics.num_loads_declined == 1 and statistics.host.num_pinned == 0
            await assert_at_rest(engine.runtime)
    (event,) = (event for event in events if event["event"] == "load_declined")
    assert event["num_tokens"] == 16
    assert event["load_s"] == pytest.approx(4.01, rel=0.1) and event["compute_s"] == pytest.approx(0.17)


async def test_what_was_declined_is_explained() -> None:
    """Both estimates, and how much is computed; until the request is over, or a match of its own is loaded again."""
    async with scripted(load_choice="cost", prefill_tokens_per_s=100.0) as (engine, transport):
        await on_the_host_only(engine, A, B)
        await a_copy_takes(engine, transport, 4.0)
        async with engine.runtime.request(A) as request:
            await request.allocate()
            assert await request.load() == 0
            (status,) = engine.runtime.reports.requests()
            assert status.declined is not None and status.declined.num_tokens == 16
            expected = (
                "computes 16 tokens of its host hit instead of loading them: first token in 0.17 s, with the load in"
            )
            assert expected in engine.runtime.explain()
            await request.preempt()
            leap(1000.0)  # what was measured is old
            await request.resume()
            assert await request.load() == 16
            assert engine.runtime.reports.requests()[0].declined is None
        assert not engine.runtime.ledger.reports.declined
        await assert_at_rest(engine.runtime)


async def test_a_fast_link_is_loaded_from() -> None:
    """As without a choice."""
    async with scripted(load_choice="cost", prefill_tokens_per_s=100.0) as (engine, transport):
        await on_the_host_only(engine, A, B)
        await a_copy_takes(engine, transport, 0.01)
        assert await engine.serve(A) == 16
        assert engine.runtime.statistics().num_loads_declined == 0
        await assert_at_rest(engine.runtime)


async def test_a_link_that_hangs_is_left_to_who_waits_for_it() -> None:
    """Others compute at once; what the link was like before does not help it."""
    async with scripted(load_choice="cost", prefill_tokens_per_s=100.0) as (engine, transport):
        await on_the_host_only(engine, A, B)
        await a_copy_takes(engine, transport, 0.01)
        await engine.evict_device()  # B is to be loaded again
        async with engine.runtime.request(B) as request:
            pending = await loading(request, transport)
            leap(5.0)
            assert await engine.serve(A) == 0
            assert engine.runtime.statistics().num_loads_declined == 1
            transport.land_all()
            assert await pending.wait() == 16
        transport.auto = True
        await assert_at_rest(engine.runtime)


async def test_a_slow_link_is_tried_again() -> None:
    """By a load that takes a hundredth of the time since it was measured. It shows how fast larger ones are by now."""
    async with scripted(load_choice="cost", prefill_tokens_per_s=100.0) as (engine, transport):
        await on_the_host_only(engine, A, B)
        await a_copy_takes(engine, transport, 4.0)
        leap(90.0)
        assert await engine.serve(A) == 0
        await on_the_host_only(engine, A)
        leap(20.0)
        assert await engine.serve(A) == 4
        await on_the_host_only(engine, A)
        assert await engine.serve(A) == 16
        await assert_at_rest(engine.runtime)


async def test_a_deadline_is_weighed() -> None:
    """An offer has what is left of it, and None without one."""
    choice = FixedChoice(4)
    async with scripted(load_choice=choice) as (engine, _):
        await on_the_host_only(engine, A, B)
        async with engine.runtime.request(A, deadline_s=50.0) as request:
            leap(20.0)
            await engine.prefill(request, A)
        assert await engine.serve(B) == 16
        first, second = choice.offers
        assert first.left_s == pytest.approx(30.0, abs=2.0) and second.left_s is None


@pytest.mark.parametrize("num_units", [0, 1, 3, 4])
async def test_a_choice_of_ones_own(num_units: int) -> None:
    """As many units are loaded as it says, and the rest is computed; a limit of the program's own stays one."""
    choice = FixedChoice(num_units)
    async with scripted(load_choice=choice, prefill_tokens_per_s=FAST) as (engine, _):
        await on_the_host_only(engine, A)
        assert await engine.serve(A) == 4 * num_units
        (offer,) = choice.offers
        assert (offer.num_units, offer.unit_tokens, offer.rest_tokens, offer.tokens_per_s) == (4, 4, 1, FAST)
        assert engine.runtime.statistics().num_loads_declined == (num_units < 4)
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("stop", [-1, 5, 1.5, None, "2"])
async def test_a_choice_that_says_nonsense_is_refused(stop: Any) -> None:
    """By name, before anything has changed: the request can still load, or leave."""
    choice = FixedChoice(stop)
    async with scripted(load_choice=choice) as (engine, _):
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            await request.allocate()
            with pytest.raises(InvalidArgument, match=r"^load_choice\.stop: "):
                await request.load()
            assert request.state is RequestState.ALLOCATED
            choice.num_units = 2
            assert await request.load(max_tokens=15) == 8
            assert choice.offers[-1].num_units == 3
        await assert_at_rest(engine.runtime)


async def test_an_engine_is_told_what_it_is_to_load() -> None:
    """With blocks of its own: its match has no more than that, and the load brings just that."""
    choice = FixedChoice(4)
    async with own_engine(load_choice=choice) as engine:
        await engine.stored(A)
        choice.num_units = 2
        assert await engine.serve(A) == 8
        assert engine.asked[-1].match.num_host_tokens == 8
        assert engine.runtime.statistics().num_loads_declined == 1
        await engine.assert_at_rest()


async def test_what_is_queued_is_counted() -> None:
    """What requests have to compute, from their load to their commit or their end; a report takes its place."""
    choice = FixedChoice(4)
    async with scripted(32, num_host_blocks=64, load_choice=choice) as (engine, _):
        runtime, seen = engine.runtime, list[int]()
        await on_the_host_only(engine, *(prompt(number, 17) for number in range(11, 16)))

        async def queued(number: int) -> int:
            async with runtime.request(prompt(number, 17)) as request:
                await request.allocate()
                await request.load()
            return choice.offers[-1].queued_tokens

        async with runtime.request(B) as other:
            await other.allocate()
            await other.load()
            seen.append(await queued(11))
            engine.compute(other, B, 0)
            other.commit(12)
            seen.append(await queued(12))
            runtime.report_queue(40)
            seen.append(await queued(13))
            other.commit(17)  # too few to be a prompt of before the report
            seen.append(await queued(14))
        runtime.report_queue(0)
        seen.append(await queued(15))
        assert seen == [17, 5, 40, 40, 0]
        await assert_at_rest(runtime)


async def test_a_speed_that_is_reported() -> None:
    """Counts like one that steps have shown; a configured one goes before it."""
    choice = FixedChoice(4)
    async with scripted(load_choice=choice) as (engine, _):
        await on_the_host_only(engine, A)
        engine.runtime.report_compute(200_000, 2000.0)
        assert await engine.serve(A) == 16
        assert choice.offers[-1].tokens_per_s == pytest.approx(100.0, rel=0.05)


BAD: dict[str, Callable[[Any], object]] = {
    "num_tokens": lambda runtime: [
        lambda wrong=wrong, call=call: call(wrong)
        for wrong in (-1, 1.5, None, True, "3", float("nan"), 10**400)
        for call in (runtime.report_queue, lambda number: runtime.report_compute(number, 1.0))
    ],
    "seconds": lambda runtime: [
        lambda wrong=wrong: runtime.report_compute(20, wrong)
        for wrong in (-1.0, None, "1", float("nan"), float("inf"), True, 1.7e308)
    ],
}


@pytest.mark.parametrize("choice", ["always", "cost"])
@pytest.mark.parametrize("argument", BAD)
async def test_what_is_no_report_is_refused(argument: str, choice: str) -> None:
    """By name, whether or not anybody asks for it."""
    async with scripted(load_choice=choice) as (engine, _):
        calls: Any = BAD[argument](engine.runtime)
        for call in calls:
            with pytest.raises(InvalidArgument, match=f"^{argument}: "):
                call()
        engine.runtime.report_queue(3)
        engine.runtime.report_compute(3, 1)
        await assert_at_rest(engine.runtime)

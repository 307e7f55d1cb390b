"""Resets: of everything or of one tier, with copies and requests under way."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from serving import BACKENDS, assert_at_rest, prompt, scripted, with_bytes

from aoffload import InvalidArgument, RequestState, Tier, WrongState
from aoffload.ledger import Completion

pytestmark = pytest.mark.anyio

A = prompt(1, 16)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_it_says_what_it_could_not_wait_for() -> None:
    """A reset that may not wait returns the ids of the copies that still run; what they bring is not published, and a
    reset that may wait returns when they are over."""
    async with scripted(8, auto=False) as (engine, transport):
        await engine.serve(A)
        (job_id,) = transport.in_flight
        assert await engine.runtime.reset(timeout_s=0) == (job_id,)
        transport.land_all()
        assert await engine.runtime.reset(timeout_s=60) == ()
        assert engine.runtime.lookup([*A, 1]).num_tokens == 0
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
async def test_the_other_tier_stays(tier: Tier) -> None:
    """What is cached elsewhere is found as before, and has the right bytes."""
    async with with_bytes(8, num_host_blocks=8) as engine:
        await engine.serve(A)
        await engine.runtime.flush()
        assert await engine.runtime.reset(tier) == ()
        found = engine.runtime.lookup([*A, 1])
        expected = (0, 16) if tier is Tier.DEVICE else (16, 0)
        assert (found.num_device_tokens, found.num_host_tokens) == expected
        assert await engine.serve([*A, 1]) == 16
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("tier", [None, Tier.DEVICE, Tier.HOST])
async def test_who_runs_keeps_its_blocks(tier: Tier | None) -> None:
    """A request that was admitted before goes on with the blocks that it has, and leaves nothing behind."""
    async with with_bytes(12, num_host_blocks=8) as engine:
        await engine.serve(A)
        tokens = [*A, *range(8)]
        async with engine.runtime.request(tokens) as request:
            await engine.prefill(request, tokens)
            table = request.block_ids
            await engine.runtime.reset(tier)
            assert request.block_ids == table
            engine.check(request, tokens, 24)
            await engine.serve(prompt(2, 16))  # somebody else takes all that is free
            engine.check(request, tokens, 24)
            request.commit(24)
        await assert_at_rest(engine.runtime)


async def test_bad_arguments_are_named() -> None:
    """What is no tier, or no time, is refused by name, and nothing is forgotten."""
    async with with_bytes(8, num_host_blocks=8) as engine:
        await engine.serve(A)
        for name, wrong in (("tier", "host"), ("tier", 1), ("timeout_s", "soon"), ("timeout_s", -1)):
            with pytest.raises(InvalidArgument, match=name):
                await engine.runtime.reset(**{name: wrong})
        assert engine.runtime.lookup([*A, 1]).num_device_tokens == 16


@pytest.mark.parametrize("call", ["load", "wait", "again", "resume"])
@pytest.mark.parametrize("tier", [None, Tier.DEVICE])
async def test_a_reset_between_a_landing_and_the_turn_of_the_task(
    call: str, tier: Tier | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load has landed, and its caller was not told yet. After a reset the caller hears of no token, and computes from
    the first one, in other blocks. No step begins on what the load has brought."""
    async with with_bytes(16, num_host_blocks=16) as engine:
        tokens, ledger = [*A, 1], engine.runtime.ledger
        await engine.serve(A)
        await engine.runtime.flush()
        await engine.runtime.reset(Tier.DEVICE)
        settle, states = ledger.settle, list[RequestState]()

        def settle_and_reset(completion: Completion) -> None:
            settle(completion)
            states.append(request.state)
            ledger.reset(tier)

        async with engine.runtime.request(tokens) as request:
            await request.allocate()
            if call == "resume":
                await request.preempt()
            monkeypatch.setattr(ledger, "settle", settle_and_reset)
            if call in ("load", "resume"):
                found = await (request.load() if call == "load" else request.resume())
            else:
                pending = request.load_nowait()
                while not pending.is_over:
                    await anyio.lowlevel.checkpoint()
                assert not pending.can_start and request.num_computed_tokens == 16
                with pytest.raises(WrongState, match="await `wait`"), engine.runtime.step([pending]):
                    pass
                found = await (request.load() if call == "again" else pending.wait())
                assert pending.can_start
            assert states[-1] is RequestState.RUNNING, "the load was over before the reset"
            assert found == request.num_computed_tokens == 0
            ledger.check_integrity()
            engine.compute(request, tokens, 0)
            request.commit(17)
        monkeypatch.undo()
        await assert_at_rest(engine.runtime)


async def test_who_was_told_before_the_reset_may_begin_a_step() -> None:
    """A load that has said how much is ready counts, also where a step names the load."""
    async with with_bytes(16, num_host_blocks=16) as engine:
        await engine.serve(A)
        async with engine.runtime.request([*A, 1]) as request:
            await request.allocate()
            pending = request.load_nowait()
            assert await pending.wait() == 16
            await engine.runtime.reset()
            assert pending.can_start
            with engine.runtime.step([pending]):
                engine.check(request, [*A, 1], pending.num_expected_tokens)
        await assert_at_rest(engine.runtime)

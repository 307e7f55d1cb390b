"""The five incidents of docs/howto/the-promise.md, each reproduced on every event loop."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from scripted import ScriptedTransport
from serving import (
    BACKENDS,
    Checkpoints,
    Engine,
    assert_at_rest,
    at_every_checkpoint,
    pinned,
    prompt,
    scripted,
    turns,
    with_bytes,
)

from aoffload import OutOfBlocks, Request, RequestState, SlidingWindow
from aoffload._common.tiers import Tier
from aoffload._kernel.records import Run
from aoffload._kernel.states import Direction

pytestmark = pytest.mark.anyio

A, B, C, D = (prompt(seed, 32) for seed in range(1, 5))
A_AND_MORE = [*A, 7]
"""Matches both blocks of A: one token is left to compute."""


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def references(request: Request, tier: Tier) -> list[int]:
    """The count of every run that the request's lease pins, last first."""
    assert request._record is not None
    return [run.parts[tier].num_references for run in request._record.leases[tier].run.path()]


def runs(engine: Engine) -> list[Run]:
    return list(engine.runtime.ledger.cache.index.runs.values())


def num_stores(transport: ScriptedTransport) -> int:
    return sum(launched.plan.direction is Direction.STORE for launched in transport.launched)


# -- I1: the hit that was gone ------------------------------------------------------------------------------------


async def a_stored_on_the_host_only(engine: Engine) -> None:
    await engine.serve(A)
    await engine.runtime.flush()
    await engine.evict_device()
    found = engine.runtime.lookup(A_AND_MORE)
    assert (found.num_device_tokens, found.num_host_tokens) == (0, 32)


async def test_i1_a_hit_stays_until_it_is_loaded() -> None:
    """b matched two host blocks; c and d store all they can before b goes on: b still loads exactly those two."""
    async with with_bytes(8, num_host_blocks=4, block_size=16) as engine:
        await a_stored_on_the_host_only(engine)
        async with engine.runtime.request(A_AND_MORE) as b:
            assert b.match.num_host_tokens == 32
            for other in (C, D):
                await engine.serve(other)
                await engine.runtime.flush()
            assert pinned(engine.runtime) == (0, 2)
            checked = engine.num_checked
            assert await engine.prefill(b, A_AND_MORE) == 32
            assert engine.num_checked == checked + 4  # both blocks: right after the load, and after the commit
            engine.runtime.check_integrity()
        await assert_at_rest(engine.runtime)


async def test_i1_giving_up_before_loading_releases() -> None:
    """Every path that never reaches the load releases the hit: leaving, failing, being cancelled."""
    async with with_bytes(8, num_host_blocks=4, block_size=16) as engine:
        await a_stored_on_the_host_only(engine)
        async with engine.runtime.request(A_AND_MORE) as b:
            assert pinned(engine.runtime) == (0, 2)
        assert (b.reason, pinned(engine.runtime)) == ("closed_early", (0, 0))
        with pytest.raises(RuntimeError, match="on purpose"):
            async with engine.runtime.request(A_AND_MORE) as b:
                raise RuntimeError("on purpose")
        assert (b.reason, pinned(engine.runtime)) == ("error: RuntimeError", (0, 0))
        async with engine.runtime.request(A_AND_MORE) as b:
            await b.allocate()
            b.cancel("client gone")
            await anyio.lowlevel.checkpoint()
        assert (b.reason, pinned(engine.runtime)) == ("client gone", (0, 0))
        await assert_at_rest(engine.runtime)


async def test_i1_cancelled_at_every_checkpoint_leaves_no_pin() -> None:
    """Wherever b is cancelled on its way to its hit, no pin is left, and the hit is still there for the next one."""

    async def scenario(k: int) -> bool:
        async with with_bytes(8, num_host_blocks=4, block_size=16) as engine:
            await a_stored_on_the_host_only(engine)
            with anyio.CancelScope() as scope:
                driver = Checkpoints(k, scope.cancel)
                await driver.run(engine.serve(A_AND_MORE))
            await assert_at_rest(engine.runtime)
            assert await engine.serve(A_AND_MORE) == 32
            await assert_at_rest(engine.runtime)
            return driver.reached

    assert await at_every_checkpoint(scenario) >= 1


# -- I2: the stolen prefix ----------------------------------------------------------------------------------------


async def test_i2_matched_device_blocks_count_at_once() -> None:
    """Right after the match the count is 1: another allocation cannot take the blocks and write into them."""
    async with with_bytes(6, num_host_blocks=0, block_size=16) as engine:
        await engine.serve(A)
        assert pinned(engine.runtime) == (0, 0)
        async with engine.runtime.request(A_AND_MORE) as a:
            assert a.match.num_device_tokens == 32
            assert set(references(a, Tier.DEVICE)) == {1}
            assert pinned(engine.runtime) == (2, 0)
            async with engine.runtime.request(B) as b:
                with pytest.raises(OutOfBlocks):
                    b.allocate_nowait(5 * 16)
                b.allocate_nowait(4 * 16)  # everything else
                for block_id in b.block_ids[0]:
                    engine.blocks.write(block_id, 666)
            assert await engine.prefill(a, A_AND_MORE) == 32  # checks the bytes
        await assert_at_rest(engine.runtime)


async def test_i2_a_failed_allocation_changes_no_count() -> None:
    """Refused room leaves every count as it was, the hits' own included."""
    async with with_bytes(6, num_host_blocks=0, block_size=16) as engine:
        await engine.serve(A)
        async with engine.runtime.request(B) as b, engine.runtime.request(A_AND_MORE) as a:
            b.allocate_nowait(4 * 16)
            before = engine.runtime.statistics(), references(a, Tier.DEVICE), a.match
            for _ in range(3):
                with pytest.raises(OutOfBlocks) as refused:
                    a.allocate_nowait()
                assert refused.value.retryable
                assert (engine.runtime.statistics(), references(a, Tier.DEVICE), a.match) == before
                engine.runtime.check_integrity()
            with pytest.raises(OutOfBlocks) as refused:
                a.allocate_nowait(7 * 16)
            assert not refused.value.retryable
            assert (engine.runtime.statistics(), references(a, Tier.DEVICE), a.match) == before
        await assert_at_rest(engine.runtime)


async def test_i2_needing_new_blocks_counts_its_own_hits() -> None:
    """Of six free blocks two are its own hits: four new ones fit, exactly."""
    async with with_bytes(6, num_host_blocks=0, block_size=16) as engine:
        await engine.serve(A)
        async with engine.runtime.request(A_AND_MORE) as a:
            a.allocate_nowait(6 * 16)
            assert pinned(engine.runtime) == (6, 0)
        await assert_at_rest(engine.runtime)


async def test_i2_abort_between_match_and_allocation_leaks_nothing() -> None:
    """Aborted between look-up and allocation, alone or as one of two: the count goes back to what it was."""
    async with with_bytes(6, num_host_blocks=0, block_size=16) as engine:
        await engine.serve(A)
        async with engine.runtime.request(A_AND_MORE) as first:
            async with engine.runtime.request(A_AND_MORE) as second:
                assert max(references(first, Tier.DEVICE)) == 2
                second.cancel("client gone")
                await anyio.lowlevel.checkpoint()
            assert second.state is RequestState.ABORTED
            assert set(references(first, Tier.DEVICE)) == {1}
            engine.runtime.check_integrity()
        assert pinned(engine.runtime) == (0, 0)
        await assert_at_rest(engine.runtime)


async def test_i2_cancelled_at_every_checkpoint_while_waiting_for_room() -> None:
    """A request whose prefix is on the device waits for free blocks: cancelled wherever it is, its prefix is not
    pinned."""

    async def scenario(k: int) -> bool:
        async with with_bytes(6, num_host_blocks=0, block_size=16) as engine:
            await engine.serve(A)
            async with anyio.create_task_group() as group:
                async with engine.runtime.request(B) as b:
                    await b.allocate(4 * 16)
                    scope = anyio.CancelScope()
                    driver = Checkpoints(k, scope.cancel)

                    async def wait_for_room() -> None:
                        with scope:
                            await driver.run(engine.serve(A_AND_MORE))

                    group.start_soon(wait_for_room)
                    await turns(4)
            await assert_at_rest(engine.runtime)
            return driver.reached

    assert await at_every_checkpoint(scenario) >= 1


# -- I3: the block stored twice -----------------------------------------------------------------------------------


async def test_i3_a_block_in_flight_is_not_stored_again() -> None:
    """A second request on the same device blocks starts no second job, before the store lands and after it."""
    async with scripted(8, num_host_blocks=8, block_size=16, auto=False) as (engine, transport):
        async with engine.runtime.request(A_AND_MORE) as first:
            await engine.prefill(first, A_AND_MORE)
            assert num_stores(transport) == 1
            host = engine.runtime.statistics().host
            assert host.num_pinned == 2
            assert await engine.serve(A_AND_MORE) == 32  # hits the same blocks while their store is in flight
            assert num_stores(transport) == 1
            assert engine.runtime.statistics().host == host
        transport.land_all()
        await turns()
        assert all(part.incoming is None for run in runs(engine) for part in run.parts)  # nothing is marked
        assert engine.runtime.statistics().host.num_cached == 2
        assert await engine.serve(A_AND_MORE) == 32
        assert num_stores(transport) == 1
        await assert_at_rest(engine.runtime)


async def test_i3_other_blocks_with_the_same_tokens_are_not_stored() -> None:
    """Two requests computed the same prompt at once: the private duplicate is not stored, in flight or landed."""
    async with scripted(8, num_host_blocks=8, block_size=16, auto=False) as (engine, transport):
        async with engine.runtime.request(A) as first, engine.runtime.request(A) as second:
            for request in (first, second):
                await request.allocate()
                engine.compute(request, A, 0)
            first.commit(32)
            second.commit(32)
            assert set(first.block_ids[0]).isdisjoint(second.block_ids[0])
            assert num_stores(transport) == 1
            transport.land_all()
            await turns()
        async with engine.runtime.request(A, max_hit_tokens=0) as third:
            await engine.prefill(third, A)
            engine.runtime.check_integrity()
        assert num_stores(transport) == 1
        assert engine.runtime.statistics().host.num_cached == 2
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("fault", ["fail", "fail half-way", "refuse"])
async def test_i3_a_failed_store_is_offered_again(fault: str) -> None:
    """A store that fails unmarks its blocks and gives its room back; the next commit offers it again, and it lands."""
    async with scripted(8, num_host_blocks=8, block_size=16, auto=False) as (engine, transport):
        if fault == "refuse":
            transport.refuse_next()
        await engine.serve(A)
        if fault != "refuse":
            (job_id,) = transport.in_flight
            transport.fail(job_id, num_landed=1 if fault == "fail half-way" else 0)
        await turns()
        landed = 1 if fault == "fail half-way" else 0
        assert all(part.incoming is None for run in runs(engine) for part in run.parts)
        host = engine.runtime.statistics().host
        assert (host.num_free, host.num_cached) == (8 - landed, landed)
        await assert_at_rest(engine.runtime)

        assert await engine.serve(A_AND_MORE) == 32
        (job_id,) = transport.in_flight
        assert transport.in_flight[job_id].plan.num_blocks == 2 - landed
        transport.land(job_id)
        await turns()
        assert engine.runtime.statistics().host.num_cached == 2
        await engine.evict_device()
        transport.auto = True
        assert await engine.serve(A_AND_MORE) == 32  # from the host, with the right content
        await assert_at_rest(engine.runtime)


# -- I4: the stale block under a window ---------------------------------------------------------------------------


async def test_i4_a_store_names_only_what_is_still_there() -> None:
    """Blocks of 4 tokens, a window of 8, 3 device blocks, a prompt of 12. Stores are refused twice while decoding
    slides the window and hands its blocks to other positions; then there is room: what is stored, and found again, is
    what lies at its position now."""
    async with with_bytes(3, num_host_blocks=2, attention=SlidingWindow(8)) as engine:
        runtime, filler, tokens = engine.runtime, prompt(8, 8), prompt(1, 12)
        await engine.serve(filler)
        await runtime.flush()
        await engine.evict_device()
        async with runtime.request(tokens) as request, runtime.request([*filler, 7]) as keeps_it_full:
            assert keeps_it_full.match.num_host_tokens == 8
            positions: dict[int, set[int]] = {}
            await engine.prefill(request, tokens)
            for number in range(1, 9):  # two blocks more than the device has
                tokens.append(number)
                await request.extend(len(tokens))
                engine.compute(request, tokens, len(tokens) - 1)
                for position, block_id in enumerate(request.block_ids[0]):
                    positions.setdefault(block_id, set()).add(position)
                request.commit(len(tokens), [number])
                engine.check(request, tokens, len(tokens))
                runtime.check_integrity()
            assert request.block_ids[0][:3] == [0, 0, 0]
            assert any(len(held) > 1 for block_id, held in positions.items() if block_id)  # changed hands
            await runtime.flush()
            assert runtime.statistics().transfers.blocks_stored == 2  # the filler's, and nothing since
            # The filler lets go first, so the last offer of the other finds room.
        await runtime.flush()
        await engine.evict_device()
        async with runtime.request([*tokens, 9]) as again:
            assert again.match.num_host_tokens == 20
            await again.allocate()
            assert await again.load() == 20
            engine.check(again, tokens, 20)
        await assert_at_rest(runtime)


# -- I5: the exact-fit prompt -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
async def test_i5_one_token_is_always_computed(tier: Tier) -> None:
    """A prompt of exactly 32 tokens with both blocks stored hits 16: one token has to be computed to have logits."""
    async with with_bytes(8, num_host_blocks=4, block_size=16) as engine:
        await engine.serve(A)
        await engine.runtime.flush()
        if tier is Tier.HOST:
            await engine.evict_device()
        found = engine.runtime.lookup(A)
        assert found.num_tokens == 16
        async with engine.runtime.request(A) as request:
            assert request.match == found
            assert (request.match.num_device_tokens if tier is Tier.DEVICE else request.match.num_host_tokens) == 16
            assert await engine.prefill(request, A) == 16
        assert await engine.serve(A_AND_MORE) == 32
        await assert_at_rest(engine.runtime)

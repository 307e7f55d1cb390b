"""A disk below the host: hits on the disk alone, shared fetches, hanging calls, and restarts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from aoffload import RequestState, Tier
from aoffload.testing import SPOILED, Client, SimulatedEngine, Simulation, Violation
from aoffload.testing.slots import Slots
from aoffload.transport import TransferRefused

from .common import after, ask, bystanders, expect, serve, store, tokens
from .table import scenario

PROMPT = tokens(1, 9)
DISK_FAULTS = ("disk_error", "disk_hang", "disk_late", "disk_lost", "disk_rot")


async def serve_and_evict(sim: Simulation, engine: SimulatedEngine, *prompts: tuple[int, ...]) -> None:
    """Serve prompts until the tier below the host has them, and have the tiers above forget them."""
    if engine.transport.disk is not None:
        await engine.runtime.disk.wait_restored()
    for number, prompt in enumerate(prompts):
        await store(sim, engine, f"before{number}", prompt)
        await forget(engine, Tier.DEVICE)
        await store(sim, engine, f"again{number}", prompt)
    # What was asked of the host twice goes down once that has changed and the disk has nothing else to do.
    await store(sim, engine, "other", tokens(90, 5))
    await engine.runtime.flush()
    await forget(engine, Tier.HOST, Tier.DEVICE)


async def forget(engine: SimulatedEngine, *tiers: Tier) -> None:
    for tier in tiers:
        engine.num_resets_of_tiers += 1
        await engine.runtime.reset(tier)


async def expect_cancelled(call: Callable[[], Awaitable[object]]) -> None:
    """A task that is cancelled already gets its cancellation before anything is taken."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        await call()
        raise Violation("deaf to a cancellation", f"{call} came to its end")


def disk_after_kill(engine: SimulatedEngine) -> Slots:
    """What the process leaves that is killed now."""
    disk = engine.transport.disk
    assert disk is not None
    return disk.after_a_kill()


def num_loaded(engine: SimulatedEngine) -> int:
    found = engine.runtime.statistics().disk_transfers
    assert found is not None
    return int(found.blocks_loaded)


@scenario("request_done", "disk_restored", faults=DISK_FAULTS)
async def only_on_disk(sim: Simulation) -> None:
    """Two requests want what only the disk has: they share the copies, and both hit."""
    engine = sim.runtime(num_device_blocks=16, num_host_blocks=16, num_slots=24, max_fetch_share=0.5)
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT)
        found = engine.runtime.lookup((*PROMPT, 7))
        expect(sim, found.num_lower_tokens == 8 and not found.num_tokens, f"not on the disk alone: {found}")
        twins = [serve(sim, engine, f"twin{number}", (*PROMPT, number)) for number in range(2)]
        bystanders(sim, engine, 2)
        await after(sim, engine)
        expect(sim, num_loaded(engine) == 4, f"{num_loaded(engine)} blocks were fetched for two, who share four")
        expect(sim, all(twin.outcome == "D" for twin in twins), "a twin has lost its hit")


async def fetches_first(sim: Simulation, engine: SimulatedEngine, prompt: tuple[int, ...], client: Client) -> None:
    """A request without blocks fetches what it goes on to load."""
    wanted = ask(sim, engine, prompt)
    async with engine.open(client.name, wanted) as request:
        client.request = request
        await sim.jitter()
        await request.fetch()
        await sim.jitter()
        await engine.run(request, wanted)
    client.ended()


async def fetches_in_vain(sim: Simulation, engine: SimulatedEngine, prompt: tuple[int, ...], client: Client) -> None:
    """Its fetch is cancelled before it begins, and it goes on."""
    wanted = ask(sim, engine, prompt)
    async with engine.open(client.name, wanted) as request:
        client.request = request
        await expect_cancelled(request.fetch)
        await engine.run(request, wanted)
    client.ended()


@scenario("request_done", faults=DISK_FAULTS)
async def fetched_ahead(sim: Simulation) -> None:
    """Fetches beside requests: awaited, left alone, given up, and by a request without blocks."""
    engine = sim.runtime(num_device_blocks=16, num_host_blocks=12, num_slots=24, max_fetch_share=0.5, verify=True)
    other = tokens(2, 7)
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT, other)

        async def ahead(client: Client) -> None:
            await sim.jitter()
            found = await engine.runtime.fetches.fetch((*PROMPT, 7)).wait()
            if found > len(PROMPT):
                raise Violation("hit cap", f"{found} tokens of {len(PROMPT)} fetched")

        async def given_up(client: Client) -> None:
            with engine.runtime.fetches.fetch(other) as pending:
                await sim.jitter()
                if sim.random.random() < 0.5:
                    await pending.wait()

        async def in_vain(client: Client) -> None:
            await expect_cancelled(engine.runtime.disk.wait_restored)
            with engine.runtime.fetches.fetch(other) as pending:
                await expect_cancelled(pending.wait)
            await fetches_in_vain(sim, engine, (*other, 8), client)

        for function in (ahead, given_up, in_vain):
            sim.spawn(function.__name__, function)
        sim.spawn("fetches first", partial(fetches_first, sim, engine, (*other, 7)))
        serve(sim, engine, "late", (*PROMPT, 8))
        await after(sim, engine)


@scenario("request_done", "transport_stalled", faults=("disk_hang", "disk_late"))
async def disk_that_hangs(sim: Simulation) -> None:
    """The disk hangs in the middle of a fetch or a store: requests go on within their bound, and the device's copies
    know nothing of it."""
    engine = sim.runtime(
        num_device_blocks=10, num_host_blocks=12, num_slots=24, max_fetch_share=0.5, fetch_timeout_s=0.5,
        close_timeout_s=5.0,
    )  # fmt: skip
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT)
        for number in range(3):
            serve(sim, engine, f"r{number}", (*PROMPT, number))
        bystanders(sim, engine, 3)
        await after(sim, engine)
        serve(sim, engine, "afterwards", (*PROMPT, 9))
        await after(sim, engine)


@scenario("request_done", faults=DISK_FAULTS)
async def evicted_while_stored(sim: Simulation) -> None:
    """A host and a disk that are too small: what is on its way down is evicted, fetched again and asked for."""
    engine = sim.runtime(
        num_device_blocks=10, num_host_blocks=8, num_slots=sim.random.choice((4, 9, 12)), max_fetch_share=0.5,
        max_job_bytes=sim.random.choice((1, 2, 100)),
    )  # fmt: skip
    async with engine.runtime:
        for number in range(8):
            prompt = tokens(number % 3, 7, branch=number % 2)
            serve(sim, engine, f"r{number}", prompt, num_new_tokens=number % 2)
            await sim.jitter()
        await after(sim, engine)


async def spoils(sim: Simulation, engine: SimulatedEngine, client: Client) -> None:
    """Commits what its forward has not computed, and takes it back once it may be on the disk."""
    wanted = ask(sim, engine, PROMPT, style="inline")
    async with engine.open(client.name, wanted) as request:
        client.request = request
        await request.allocate()
        num_ready = await request.load()
        await engine.forward(request, wanted, wanted.tokens, num_ready, 9)
        for block_id in request.block_ids[0][num_ready // 2 :]:
            engine.device.content[block_id] = SPOILED
        engine.commit(request, wanted, wanted.tokens, 9)
        try:
            await engine.runtime.flush()
            for number in range(2):
                engine.runtime.lookup((*PROMPT, number))
            await sim.jitter()
        finally:
            engine.num_invalidations += 1
            if request.state is RequestState.RUNNING:
                request.invalidate(num_ready)
    client.ended()


@scenario("request_done")
async def taken_back_on_disk(sim: Simulation) -> None:
    """A forward has failed, and what it left is on the disk or on its way there: neither this process nor the next one
    finds it."""
    engine = sim.runtime(num_device_blocks=16, num_host_blocks=8, num_slots=12, max_fetch_share=0.5)
    async with engine.runtime:
        await engine.runtime.disk.wait_restored()
        sim.spawn("spoils", lambda client: spoils(sim, engine, client)).may_abort = ("prefix_invalidated",)
        for number in range(4):
            client = serve(sim, engine, f"r{number}", (*PROMPT, number))
            client.may_abort = ("prefix_invalidated",)
        bystanders(sim, engine, 3, num_tokens=8)
        await sim.join()
        left = disk_after_kill(engine)
        await forget(engine, Tier.HOST, Tier.DEVICE)
        serve(sim, engine, "afterwards", (*PROMPT, 9))
        await after(sim, engine)
    await _found_by_the_next(sim, engine, left)


@scenario("request_done", faults=("disk_unread", "disk_reset", *DISK_FAULTS))
async def restarted_under_load(sim: Simulation) -> None:
    """A process is killed while it serves, and the next one serves the same prompts before it has read its disk. What
    was on the disk at that moment hits."""
    engine = sim.runtime(num_device_blocks=12, num_host_blocks=8, num_slots=24, max_fetch_share=0.5)
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT)
        for number in range(3):
            serve(sim, engine, f"old{number}", tokens(1, 9, branch=number))
        await sim.jitter()
        await sim.jitter()
        left = disk_after_kill(engine)
        await after(sim, engine)
    await _found_by_the_next(sim, engine, left)


async def _found_by_the_next(sim: Simulation, engine: SimulatedEngine, left: Slots) -> None:
    following = sim.successor(engine, left)
    async with following.runtime:
        for number in range(2):
            serve(sim, following, f"new{number}", (*PROMPT, number))
        await following.runtime.disk.wait_restored()
        serve(sim, following, "new", (*PROMPT, 5))
        await after(sim, following)


@scenario("request_done", faults=("disk_reset",))
async def reset_with_a_disk(sim: Simulation) -> None:
    """A reset, of all or of the disk, while requests run and stores are under way: no restart finds what was before."""
    engine = sim.runtime(num_device_blocks=12, num_host_blocks=8, num_slots=24, max_fetch_share=0.5)
    tier = sim.random.choice((None, Tier.DISK))
    async with engine.runtime:
        await serve_and_evict(sim, engine, PROMPT)
        serve(sim, engine, "r", (*PROMPT, 1))
        await sim.jitter()
        if tier is None:
            engine.forget_everything()
        else:
            engine.num_resets_of_tiers += 1
        try:
            await engine.runtime.reset(tier)
        except TransferRefused:
            await after(sim, engine)
            return  # nobody may rely on it
        left = disk_after_kill(engine)
        if tier is Tier.DISK and left.proven(engine.runtime.ledger.layout.components):
            expect(sim, not left.records or _is_new(engine, left), "a reset leaves what was there")
        await after(sim, engine)
    await _found_by_the_next(sim, engine, left)


def _is_new(engine: SimulatedEngine, left: Slots) -> bool:
    """Whether all that is left was stored since the last reset."""
    disk = engine.transport.disk
    return disk is not None and all(record.generation == disk.slots.generation for record in left.records.values())

"""Committed forwards that turn out to have failed: their KV is invalidated in every tier."""

from __future__ import annotations

from aoffload import RequestState, Tier
from aoffload.testing import SPOILED, Client, SimulatedEngine, Simulation

from .common import after, ask, serve, tokens
from .table import scenario

PROMPT = tokens(1, 9)
SHORT_OF_ROOM = ("prefix_invalidated",)
"""Abort reasons of a request that invalidates blocks which others still read: it may find no room to compute them again
elsewhere."""


async def fails(sim: Simulation, engine: SimulatedEngine, client: Client) -> None:
    """Commits what its forward has not computed, invalidates it and computes it again."""
    wanted = ask(sim, engine, PROMPT, style="inline")
    async with engine.open(client.name, wanted) as request:
        client.request = request
        await request.allocate()
        num_ready = await request.load()
        start = max(num_ready, sim.random.choice((2, 4, 6)))
        await engine.forward(request, wanted, wanted.tokens, num_ready, start)
        for block_id in request.block_ids[0][start // 2 :]:
            engine.device.content[block_id] = SPOILED
        engine.commit(request, wanted, wanted.tokens, 9)
        try:
            await sim.jitter()
            await sim.jitter()
        finally:
            engine.num_invalidations += 1
            if request.state is RequestState.RUNNING:
                request.invalidate(start)
        await sim.jitter()
        await engine.forward(request, wanted, wanted.tokens, start, 9)
        engine.commit(request, wanted, wanted.tokens, 9)
    client.ended()


async def stubborn(sim: Simulation, engine: SimulatedEngine, client: Client) -> None:
    """Commits once more on its way out, whatever it was told."""
    wanted = ask(sim, engine, tokens(1, 9, branch=3), style="inline")
    sim.asks.append(wanted)
    async with engine.open(client.name, wanted) as request:
        client.request = request
        await request.allocate()
        num_ready = await request.load()
        await engine.forward(request, wanted, wanted.tokens, num_ready, 9)
        try:
            await sim.jitter()
            await sim.jitter()
        finally:
            if request.state is RequestState.RUNNING:
                engine.commit(request, wanted, wanted.tokens, 9)
    client.ended()


async def resets_device(sim: Simulation, engine: SimulatedEngine, client: Client) -> None:
    await sim.jitter()
    engine.num_resets_of_tiers += 1
    await engine.runtime.reset(Tier.DEVICE, timeout_s=0.01)


@scenario("request_done")
async def failed_forwards(sim: Simulation) -> None:
    """A committed forward turns out to have failed: what it wrote is invalidated, also for requests that matched it.

    Some of these wait for the rest of their room on a full device."""
    engine = sim.runtime(num_device_blocks=sim.random.choice((6, 16)), num_host_blocks=14)
    async with engine.runtime:
        sim.spawn("fails", lambda client: fails(sim, engine, client)).may_abort = SHORT_OF_ROOM
        sim.spawn("stubborn", lambda client: stubborn(sim, engine, client)).may_abort = ("prefix_invalidated",)
        for index in range(4):
            client = serve(sim, engine, f"r{index}", tokens(1, 9, branch=index % 2))
            client.may_abort = ("prefix_invalidated",)
        await sim.join()
        for branch in (0, 1, 3):
            serve(sim, engine, f"afterwards{branch}", tokens(1, 10, branch=branch))
        await after(sim, engine)


@scenario("request_preempted", "request_done")
async def failed_in_turmoil(sim: Simulation) -> None:
    """A committed forward has failed, while other requests are preempted and resumed, and the device is reset."""
    rng = sim.random
    engine = sim.runtime(num_device_blocks=rng.choice((6, 8, 12)), num_host_blocks=rng.choice((0, 4, 14)))
    async with engine.runtime:
        sim.spawn("fails", lambda client: fails(sim, engine, client)).may_abort = SHORT_OF_ROOM
        for index in range(4):
            length, number = rng.randint(8, 9), rng.randint(1, 2)
            client = serve(sim, engine, f"r{index}", PROMPT[:length], num_preemptions=number, num_new_tokens=index % 2)
            client.may_abort = ("prefix_invalidated",)
        if rng.random() < 0.5:
            sim.spawn("resets", lambda client: resets_device(sim, engine, client))
        await sim.join()
        serve(sim, engine, "afterwards", tokens(1, 10))
        await after(sim, engine)

"""The five founding incidents."""

from __future__ import annotations

from aoffload.testing import Client, Simulation

from .common import after, ask, bystanders, evict_device, expect, serve, store, tokens
from .table import scenario


@scenario("job_launched")
async def hit_that_was_gone(sim: Simulation) -> None:
    """I1: b matches what is in host memory and dawdles; c and d want to store there. b still loads it."""
    engine = sim.runtime(num_device_blocks=12, num_host_blocks=4)
    async with engine.runtime:
        prompt = tokens(1, 5)
        await store(sim, engine, "a", prompt[:4])
        await evict_device(engine)
        wanted = ask(sim, engine, prompt)

        async def b(client: Client) -> None:
            async with engine.open("b", wanted) as request:
                client.request = request
                found = request.match.num_tokens
                await sim.jitter()
                await sim.jitter()
                await engine.run(request, wanted)
                expect(sim, found == request.match.num_tokens, f"b matched {found}, then {request.match}")
            client.ended()

        sim.spawn("b", b)
        for number, name in enumerate("cd", start=2):
            serve(sim, engine, name, tokens(number, 4), deadline_s=None)
        bystanders(sim, engine, 2, 4)
        await after(sim, engine)


@scenario("request_allocated")
async def stolen_prefix(sim: Simulation) -> None:
    """I2: a matches blocks that are cached on the device and dawdles; b allocates all there is. a reads its own."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=sim.random.choice((0, 6)))
    async with engine.runtime:
        prompt = tokens(1, 5)
        await store(sim, engine, "first", prompt[:4])
        wanted = ask(sim, engine, prompt)

        async def a(client: Client) -> None:
            async with engine.open("a", wanted) as request:
                client.request = request
                await sim.jitter()
                await engine.run(request, wanted)
            client.ended()

        sim.spawn("a", a)
        for index in range(4):
            serve(sim, engine, f"b{index}", tokens(10 + index, 8), num_new_tokens=sim.random.choice((0, 0, 2)))
        await after(sim, engine)


@scenario("job_completed", faults=("vanish", "lose", "fail"))
async def stored_twice(sim: Simulation) -> None:
    """I3: others hit the same device blocks while they are being stored, and again when that has failed."""
    engine = sim.runtime(num_device_blocks=14, num_host_blocks=10, max_job_bytes=sim.random.choice((1, 100)))
    async with engine.runtime:
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1, 7, branch=index % 2))
        bystanders(sim, engine, 2)
        await after(sim, engine)
        await engine.serve("again", ask(sim, engine, tokens(1, 7)))
        await engine.runtime.flush()
        found = engine.runtime.lookup(tokens(1, 7))
        expect(sim, found.num_tokens == 6, f"6 tokens were stored, {found} are there")


@scenario("store_skipped")
async def stale_blocks(sim: Simulation) -> None:
    """I4: stores are refused for want of host blocks; the device blocks change hands; then there is room again."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=3)
    async with engine.runtime:
        for index in range(5):
            serve(sim, engine, f"r{index}", tokens(index % 3, 6, shared=2, branch=index), num_new_tokens=index % 3)
        await after(sim, engine)
        await engine.serve("again", ask(sim, engine, tokens(0, 6, shared=2)))


@scenario("request_done")
async def exact_fit(sim: Simulation) -> None:
    """I5: prompts that are cached to their last block still compute a token, also when they fill the pool."""
    engine = sim.runtime(num_device_blocks=4, num_host_blocks=8, max_job_bytes=sim.random.choice((1, 100)))
    async with engine.runtime:
        prompt = tokens(1, 8)
        for index in range(6):
            serve(sim, engine, f"r{index}", prompt[: 8 if index % 2 else sim.random.choice((4, 4, 6))])
        await after(sim, engine)
        async with engine.open("exact", ask(sim, engine, prompt)) as request:
            expect(sim, request.match.num_tokens <= 6, f"hit {request.match}")

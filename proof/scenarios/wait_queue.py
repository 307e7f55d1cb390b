"""Too few free blocks: wait queues, growth, and cancelled waits."""

from __future__ import annotations

import anyio

from aoffload import OutOfBlocks
from aoffload.testing import Client, Simulation

from .common import after, ask, evict_device, serve, store, tokens
from .table import scenario


@scenario("request_aborted")
async def growing(sim: Simulation) -> None:
    """All requests grow and none has room: extensions go first, and the youngest fails when only waiters hold room."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=4)
    async with engine.runtime:
        for index in range(5):
            serve(sim, engine, f"r{index}", tokens(index, 4), num_new_tokens=sim.random.randint(2, 6))
        await after(sim, engine)


@scenario("request_done")
async def retries(sim: Simulation) -> None:
    """A wait for free blocks that was given up, and tried again; the same with a load."""
    engine = sim.runtime(num_device_blocks=5, num_host_blocks=8)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 6))

        async def patient(client: Client) -> None:
            wanted = ask(sim, engine, tokens(1, 8), waits=True)
            async with engine.open(client.name, wanted) as request:
                client.request = request
                for patience_s in (0.001, 0.0, 0.01, 0.003, None):
                    with anyio.move_on_after(patience_s):
                        await request.allocate()
                        break
                pending = request.load_nowait()
                for patience_s in (0.001, 0.0, 0.002):
                    with anyio.move_on_after(patience_s):
                        await pending.wait()
                num_ready = await pending.wait()
                engine.check_ready(request, wanted, wanted.tokens, num_ready)
                await engine.prefill(request, wanted, num_ready)
            client.ended()

        sim.spawn("patient", patient)
        sim.spawn("patient2", patient)
        for index in range(3):
            serve(sim, engine, f"r{index}", tokens(2 + index, sim.random.choice((2, 5, 8))))
        await after(sim, engine)


@scenario("request_allocated", faults=("vanish", "raise", "lose", "hang"))
async def second_try(sim: Simulation) -> None:
    """Quarantine takes room while requests wait for all of it: each gets an error, and asks for less."""
    engine = sim.runtime(num_device_blocks=6, num_host_blocks=8)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)

        async def modest(client: Client) -> None:
            wanted = ask(sim, engine, tokens(1, 5))
            async with engine.open(client.name, wanted) as request:
                client.request = request
                await sim.jitter()
                try:
                    await request.allocate(12)
                except OutOfBlocks:
                    await sim.jitter()
                    await request.allocate()
                num_ready = await request.load()
                engine.check_ready(request, wanted, wanted.tokens, num_ready)
                await engine.prefill(request, wanted, num_ready)
            client.ended()

        for index in range(2):
            serve(sim, engine, f"load{index}", tokens(1, sim.random.randint(7, 9)))
            sim.spawn(f"modest{index}", modest)
        serve(sim, engine, "other", tokens(2, sim.random.randint(3, 6)))
        await after(sim, engine)


@scenario("request_loading", faults=("lose", "hang"))
async def late_room(sim: Simulation) -> None:
    """Late proof gives room back while a request keeps the rest: requests that wait for it are served then."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=8)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 6))
        await evict_device(engine)

        async def keeps(client: Client) -> None:
            wanted = ask(sim, engine, tokens(2, 8), style="inline")
            async with engine.open(client.name, wanted) as request:
                client.request = request
                await engine.run(request, wanted)
                await sim.sleep(sim.random.choice((0.5, 1.5)))
            client.ended()

        sim.spawn("keeps", keeps)
        for index in range(2):
            serve(sim, engine, f"load{index}", tokens(1, 7))
            serve(sim, engine, f"r{index}", tokens(3 + index, sim.random.randint(5, 8)))
        await after(sim, engine)

"""Several ranks: a plan is one transfer on each, and over when it is over on all of them."""

from __future__ import annotations

from aoffload import FullAttention, SlidingWindow
from aoffload.testing import Client, Simulation

from .common import after, ask, evict_device, serve, store, tokens
from .table import scenario


@scenario("request_loading", "job_completed", faults=("fail", "lose", "hang", "refuse", "rot"))
async def two_ranks(sim: Simulation) -> None:
    """Each rank has its own memories and its own faults: a block that one rank lacks is a miss on all."""
    rng = sim.random
    engine = sim.runtime(
        num_device_blocks=12, num_host_blocks=rng.choice((6, 14)), num_ranks=2, verify=rng.random() < 0.5,
        max_job_bytes=rng.choice((1, 2, 100)), stream=rng.random() < 0.3,
    )  # fmt: skip
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1 + index % 2, rng.randint(5, 9)), num_new_tokens=index % 2)
        await after(sim, engine)


@scenario("request_loading", "store_skipped", faults=("fail", "lose", "vanish"))
async def hours_with_a_full_host(sim: Simulation) -> None:
    """Incident I1: two ranks, five window layers to one full layer, a full host, and requests that return for hours."""
    rng = sim.random
    kinds = (*[SlidingWindow(4)] * 5, FullAttention())
    engine = sim.runtime(
        num_device_blocks=48, num_host_blocks=rng.choice((40, 54)), num_ranks=2, block_sizes=(2,) * 6, attention=kinds,
        max_job_bytes=rng.choice((4, 100)),
    )  # fmt: skip
    async with engine.runtime:
        for number in range(3):

            async def returns(client: Client, number: int = number) -> None:
                for turn in range(4):
                    await sim.sleep(rng.choice((1.0, 600.0, 3600.0)))
                    wanted = ask(sim, engine, tokens(number, 6 + 2 * (turn % 3)), num_new_tokens=turn % 2)
                    async with engine.open(f"{client.name}.{turn}", wanted) as request:
                        client.request = request
                        await sim.jitter()  # between the match and its use
                        await engine.run(request, wanted)
                    client.ended()

            sim.spawn(f"user{number}", returns)
        await after(sim, engine)

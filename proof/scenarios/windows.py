"""Models with layers of different windows: windows slide, and blocks before a window are reused."""

from __future__ import annotations

from aoffload import ChunkedLocal, FullAttention, SlidingWindow
from aoffload.testing import Client, Simulation

from .common import after, ask, evict_device, serve, tokens
from .table import scenario


@scenario("request_done", faults=("fail", "lose", "rot", "flip"))
async def mixed_windows(sim: Simulation) -> None:
    """Groups of any kind and block size, drawn anew for each seed; some models have no full attention at all."""
    rng = sim.random
    kinds = (SlidingWindow(rng.randint(1, 9)), ChunkedLocal(rng.choice((3, 4, 6))), FullAttention())
    attention = tuple(rng.choices(kinds, k=rng.choice((1, 2, 3))))
    sizes = tuple(rng.choice((2, 2, 4)) for _ in attention)
    engine = sim.runtime(
        num_device_blocks=rng.choice((20, 30)), num_host_blocks=rng.choice((10, 30)), block_sizes=sizes,
        attention=attention, stream=rng.random() < 0.3, verify=rng.random() < 0.4, max_job_bytes=rng.choice((1, 100)),
    )  # fmt: skip
    async with engine.runtime:
        for wave in range(2):
            for index in range(4):
                prompt = tokens(index % 2, rng.choice((5, 8, 9)), shared=5)
                serve(
                    sim, engine, f"r{wave}{index}", prompt, num_new_tokens=rng.choice((0, 2)),
                    max_load_tokens=rng.choice((None, None, 4)), in_slices=rng.random() < 0.3,
                )  # fmt: skip
            await after(sim, engine)
            await evict_device(engine)


@scenario("store_skipped", "request_done")
async def stale_window(sim: Simulation) -> None:
    """Incident I4: stores are refused while decoding slides the window and its blocks change hands.

    When there is room again, only blocks that are still there are stored."""
    engine = sim.runtime(num_device_blocks=7, num_host_blocks=2, block_sizes=(2,), attention=(SlidingWindow(4),))
    async with engine.runtime:

        async def hold(client: Client) -> None:
            """Fill the host, and keep it full for a while."""
            await engine.serve("filler", ask(sim, engine, tokens(9, 5)))
            async with engine.open("holds", ask(sim, engine, tokens(9, 5))):
                await sim.jitter()
                await sim.jitter()

        sim.spawn("hold", hold)
        for index in range(2):
            serve(sim, engine, f"r{index}", tokens(index, 6), num_new_tokens=6)
        await after(sim, engine)
        for index in range(2):
            await engine.serve(f"again{index}", ask(sim, engine, tokens(index, 7)))

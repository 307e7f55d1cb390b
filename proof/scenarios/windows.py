"""Models whose layers see different distances: windows slide, and what has left one is room for others."""

from __future__ import annotations

from typing import Any

from aoffload import ChunkedLocal, FullAttention, SlidingWindow
from aoffload.testing import Client, Simulation

from .common import after, ask, canceller, evict_device, expect, serve, store, tokens
from .table import scenario

FULL_AND_SLIDING = (FullAttention(), SlidingWindow(4))
"""As in Gemma and gpt-oss."""


@scenario("request_loading", "request_done", faults=("fail", "refuse", "vanish"))
async def sliding(sim: Simulation) -> None:
    """Full attention and a window share one pool: prompts that are longer than the window come back from the host."""
    engine = sim.runtime(
        num_device_blocks=16, num_host_blocks=sim.random.choice((8, 24)), block_sizes=(2, 2),
        attention=FULL_AND_SLIDING, max_job_bytes=sim.random.choice((1, 2, 100)),
    )  # fmt: skip
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1, sim.random.randint(6, 11)), num_new_tokens=index % 3)
        serve(sim, engine, "other", tokens(2, 8), num_new_tokens=3)
        await after(sim, engine)


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


@scenario("request_done")
async def long_prompt_small_window(sim: Simulation) -> None:
    """A window alone: prompts far larger than the pool, slice by slice, in the room that the window leaves."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=8, attention=(SlidingWindow(4),))
    async with engine.runtime:
        for index in range(3):
            options: dict[str, Any] = {"slice_tokens": 2, "in_slices": True, "num_new_tokens": index}
            serve(sim, engine, f"r{index}", tokens(index % 2, 24), **options)
        await after(sim, engine)


@scenario("store_skipped", "request_done")
async def stale_window(sim: Simulation) -> None:
    """I4 as it was: stores are refused while decoding slides the window and its blocks change hands; then there is room
    again, and what is stored is what is still there."""
    engine = sim.runtime(num_device_blocks=7, num_host_blocks=2, block_sizes=(2,), attention=(SlidingWindow(4),))
    async with engine.runtime:

        async def hold(client: Client) -> None:
            """Fill the host, and let it go later."""
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


@scenario("request_loading", "request_aborted", faults=("hang", "fail", "vanish"))
async def shared_windows(sim: Simulation) -> None:
    """Several want the same windows from the host at once, and some of them leave."""
    engine = sim.runtime(
        num_device_blocks=24, num_host_blocks=20, block_sizes=(2, 2), attention=FULL_AND_SLIDING,
        max_jobs_in_flight=sim.random.choice((1, 4)), max_job_bytes=sim.random.choice((1, 100)),
    )  # fmt: skip
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        found = engine.runtime.lookup(tokens(1, 9))
        expect(sim, found.num_tokens == 8, f"8 tokens were stored, {found} are there")
        await evict_device(engine)
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1, 9, branch=index // 3, shared=8), num_new_tokens=index % 2)
        canceller(sim, engine, "r0", "r2")
        await after(sim, engine)

"""Store policies: KV that is stored late, or the second time, or not at all, is right bytes or a miss all the same."""

from __future__ import annotations

from typing import Any

from aoffload import LazyStore, SelectiveStore
from aoffload.testing import Simulation

from .common import after, ask, evict_device, expect, serve, tokens
from .table import scenario


@scenario("request_loading", "job_completed", faults=("fail", "hang", "vanish"))
async def about_to_be_evicted(sim: Simulation) -> None:
    """Lazy stores run while requests take the room; requests that come back find what was stored in time."""
    rng = sim.random
    engine = sim.runtime(
        num_device_blocks=9, num_host_blocks=rng.choice((6, 30)), store_policy=LazyStore(rng.randint(2, 6)),
        stream=rng.random() < 0.5, max_job_bytes=rng.choice((1, 2, 100)), max_jobs_in_flight=rng.choice((1, 4)),
    )  # fmt: skip
    async with engine.runtime:
        for wave in range(3):
            for family in range(3):
                prompt = tokens(family, rng.randint(4, 7))
                serve(sim, engine, f"r{wave}{family}", prompt, num_new_tokens=rng.choice((0, 1, 2)))
            await after(sim, engine)


@scenario("request_loading")
async def stored_in_time(sim: Simulation) -> None:
    """Prompts served one by one: nothing within the write-back watermark is lost. Then all are wanted at once."""
    engine = sim.runtime(num_device_blocks=9, num_host_blocks=30, store_policy=LazyStore(6))
    async with engine.runtime:
        for family in range(3):
            await engine.serve(f"r{family}", ask(sim, engine, tokens(family, 7)))
            await engine.runtime.flush()
            found = engine.runtime.statistics().transfers.blocks_stored
            expect(sim, found == family * 3, f"{family} prompts had to be stored, not {found} blocks")
        hits = [engine.runtime.lookup(tokens(family, 7)).num_tokens for family in range(3)]
        expect(sim, hits == [6, 6, 6], f"all three are somewhere, not {hits}")
        for turn in range(6):
            serve(sim, engine, f"again{turn}", tokens(turn % 3, 7))
        await after(sim, engine)


@scenario("request_loading")
async def asked_for_twice(sim: Simulation) -> None:
    """A selective policy stores a prefix at the second request, even if it was evicted everywhere in between.

    It counts no more prefixes than configured."""
    engine = sim.runtime(num_device_blocks=9, num_host_blocks=30, store_policy=SelectiveStore(2, 2000))
    async with engine.runtime:
        for turn in range(3):
            await engine.serve(f"r{turn}", ask(sim, engine, tokens(1, 7)))
            await engine.runtime.flush()
            found = engine.runtime.statistics().transfers.blocks_stored
            expect(sim, found == (3 if turn else 0), f"{found} blocks stored after {turn + 1} times")
            await evict_device(engine)
        for index in range(6):
            serve(sim, engine, f"beside{index}", tokens(60 + index, 2), num_new_tokens=2, store="none", waits=True)
        for family in range(2, 12):
            await engine.serve(f"other{family}", ask(sim, engine, tokens(family, 7)))
        await engine.serve("again", ask(sim, engine, tokens(2, 7)))
        await after(sim, engine)
        found = engine.runtime.statistics().transfers.blocks_stored
        expect(sim, found == 3, f"{found - 3} blocks stored that nobody could remember")


@scenario("request_done")
async def not_to_be_stored(sim: Simulation) -> None:
    """Some requests want none or only a part of their KV stored: the rest is not in the host, whatever the policy."""
    rng = sim.random
    policy: Any = rng.choice(("eager", LazyStore(4), LazyStore(9), SelectiveStore(1)))
    engine = sim.runtime(num_device_blocks=10, num_host_blocks=30, store_policy=policy)
    async with engine.runtime:
        for index in range(2):
            wishes: dict[str, Any] = rng.choice(({}, {"reads_cache": False}, {"store": "prompt"}))
            serve(sim, engine, f"r{index}", tokens(index % 2, 6), num_new_tokens=index % 3, **wishes)
            serve(sim, engine, f"private{index}", tokens(5, 7), num_new_tokens=2, store="none")
            serve(sim, engine, f"start{index}", tokens(6, 7), max_store_tokens=3)
            serve(sim, engine, f"branch{index}", tokens(6, 7, branch=1), store="none")
        await after(sim, engine)
        await evict_device(engine)
        for family, most in ((5, 0), (6, 2)):
            found = engine.runtime.lookup(tokens(family, 7)).num_host_tokens
            expect(sim, found <= most, f"{found} tokens in the host where at most {most} may be")

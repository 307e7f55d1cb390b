"""Copies: split, bounded, stalled, verified, and on a device that is lost."""

from __future__ import annotations

from aoffload.testing import SimulatedEngine, Simulation, Violation
from aoffload.testing.memory import TORN

from .common import after, canceller, evict_device, expect, serve, store, tokens
from .table import scenario


@scenario("job_launched", faults=("fail", "lose", "hang", "twice"))
async def split_transfers(sim: Simulation) -> None:
    """Transfers in pieces of one block, one or many at a time: published in prefix order however they land."""
    engine = sim.runtime(
        num_device_blocks=12, num_host_blocks=12, max_job_bytes=1, max_jobs_in_flight=sim.random.choice((1, 2, 8))
    )
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 10))
        await evict_device(engine)
        for index in range(5):
            serve(sim, engine, f"r{index}", tokens(index % 2, sim.random.randint(6, 10), branch=index % 3, shared=8))
        await after(sim, engine)


@scenario("request_loading")
async def loads_first(sim: Simulation) -> None:
    """Loads and stores compete for few places in flight: the bounds hold, and queued jobs may still be discarded."""
    engine = sim.runtime(
        num_device_blocks=14, num_host_blocks=12, max_jobs_in_flight=sim.random.choice((1, 3)), max_bytes_in_flight=2
    )
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(3):
            serve(sim, engine, f"load{index}", tokens(1, 9))
            serve(sim, engine, f"store{index}", tokens(5 + index, 6))
        if sim.random.random() < 0.5:
            canceller(sim, engine, "load0", "load1", "load2")
        await after(sim, engine)
        expect(sim, len(engine.transport.in_flight) == 0, "something is in flight")


@scenario("transport_stalled", faults=("hang", "stuck_fence"))
async def stalled(sim: Simulation) -> None:
    """Copies that never end, and more after them: requests get misses instead of queuing, and every wait ends."""
    engine = sim.runtime(
        num_device_blocks=14, num_host_blocks=14, max_jobs_in_flight=sim.random.choice((1, 2)), max_job_bytes=1,
        load_timeout_s=3.0, transfer_timeout_s=8.0,
    )  # fmt: skip
    async with engine.runtime:
        for wave in range(3):
            for index in range(2):
                serve(sim, engine, f"r{wave}{index}", tokens(sim.random.randrange(3), 6))
            await sim.join()
            if sim.random.random() < 0.5:
                await engine.runtime.flush()
            await sim.sleep(sim.random.choice((0.0, 5.0, 10.0)))
            await evict_device(engine)
        await after(sim, engine)


@scenario("cache_turned_off", faults=("device_lost",))
async def lost_device(sim: Simulation) -> None:
    """A device is lost before or during a copy: the cache is turned off, which is logged once, and requests go on."""
    engine = sim.runtime(
        num_device_blocks=14, num_host_blocks=14, max_jobs_in_flight=sim.random.choice((1, 4)), max_job_bytes=1,
        num_ranks=sim.random.choice((1, 2)), stream=sim.random.random() < 0.3,
    )  # fmt: skip
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(5):
            serve(sim, engine, f"r{index}", tokens(1 + index % 2, sim.random.randint(5, 9)), num_new_tokens=index % 2)
        await after(sim, engine)
        found = engine.runtime.statistics()
        if sim.faults.fired["device_lost"] and not (found.off_reason and sim.log.counts["cache_turned_off"] == 1):
            raise Violation("a loss was ignored", f"{found.off_reason!r}, {sim.log.counts['cache_turned_off']} events")


@scenario("request_loading", faults=("fail",))
async def rotten(sim: Simulation) -> None:
    """Many requests load corrupt host blocks, some twice at a time: a bad block is freed when its loads are over."""
    engine = sim.runtime(num_device_blocks=24, num_host_blocks=14, verify=True, max_job_bytes=1, max_jobs_in_flight=8)
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        for wave in range(2):
            await evict_device(engine)
            _rot(sim, engine)
            for index in range(5):
                serve(sim, engine, f"r{wave}{index}", tokens(1, sim.random.randint(5, 9)))
            await after(sim, engine)


def _rot(sim: Simulation, engine: SimulatedEngine) -> None:
    host = engine.transport.host
    sim.faults.fired["rot"] += 1
    for block_id in range(host.num_rows):
        if host.is_owned[block_id] and sim.random.random() < 0.6:
            host.content[block_id] = TORN

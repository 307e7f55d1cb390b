"""Requests that want the same blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aoffload import FullAttention, KeySpan, SlidingWindow
from aoffload._kernel.pools import LeastRecentlyUsed
from aoffload._kernel.records import Part
from aoffload.testing import Client, Simulation

from .common import after, ask, bystanders, canceller, evict_device, expect, serve, store, tokens
from .table import scenario


@scenario("request_loading", faults=("fail", "refuse", "vanish", "hang"))
async def shared_load(sim: Simulation) -> None:
    """Several requests want the same blocks from the host at once; the one that began the load may leave."""
    engine = sim.runtime(
        num_device_blocks=16, num_host_blocks=10, max_job_bytes=sim.random.choice((1, 2, 100)),
        max_jobs_in_flight=sim.random.choice((1, 4)),
    )  # fmt: skip
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1, sim.random.randint(5, 9)), num_new_tokens=index % 2)
        bystanders(sim, engine, 2)
        if sim.random.random() < 0.5:
            canceller(sim, engine, "r0", "r2")
        await after(sim, engine)


@scenario("request_loading", "request_done", faults=("fail", "lose", "twice"))
async def branches(sim: Simulation) -> None:
    """Prompts that diverge inside blocks and runs which other requests load, compute and evict at the same time."""
    engine = sim.runtime(num_device_blocks=9, num_host_blocks=12, max_job_bytes=2)
    async with engine.runtime:
        for index in range(6):
            prompt = tokens(1, sim.random.randint(5, 11), branch=index % 3, shared=sim.random.choice((2, 5)))
            serve(sim, engine, f"r{index}", prompt, max_load_tokens=sim.random.choice((None, None, 4)))
        await after(sim, engine)


@scenario("request_loading")
async def conversations(sim: Simulation) -> None:
    """Turns that build on each other, more of them than the device can keep."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=sim.random.choice((5, 16)))
    async with engine.runtime:
        for number in range(3):

            async def talk(client: Client, number: int = number) -> None:
                own_tokens = tokens(number, 4)
                for turn in range(3):
                    await sim.jitter()
                    wanted = ask(sim, engine, own_tokens, num_new_tokens=2, slice_tokens=100)
                    async with engine.open(f"{client.name}.{turn}", wanted) as request:
                        client.request = request
                        await engine.run(request, wanted)
                    client.ended()
                    own_tokens = (*own_tokens, 1000, 1001, *range(turn * 10, turn * 10 + 2))

            sim.spawn(f"talk{number}", talk)
        await after(sim, engine)


@scenario("request_done")
async def tenants(sim: Simulation) -> None:
    """The same tokens under other salts, adapters and images: never a hit across, whatever is shared within."""
    engine = sim.runtime(num_device_blocks=14, num_host_blocks=14)
    async with engine.runtime:
        for index in range(6):
            salt, adapter = (None, "t1", "t2")[index % 3], (None, "lora")[index // 3]
            serve(sim, engine, f"r{index}", tokens(1, 7), salt=salt, adapter=adapter)
        for index in range(4):
            image = KeySpan(index % 3, 4, bytes([index // 2]) * 16)
            serve(sim, engine, f"image{index}", tokens(1, 7), key_spans=(image,))
        serve(sim, engine, "r6", tokens(1, 7), salt="t1")
        for index in range(3):  # other placeholder tokens under the same image
            prompt = (index % 2, index % 2, *tokens(1, 7)[2:])
            serve(sim, engine, f"under{index}", prompt, key_spans=(KeySpan(0, 2, b"image" * 4),))
        await after(sim, engine)


@scenario("request_done")
async def least_recently_used(sim: Simulation) -> None:
    """Under pressure, prefixes touched last survive in both tiers, and a prefix loses its tail first."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=8)
    async with engine.runtime:
        for family in (1, 2, 1, 2):  # a store that lands is a touch, too: each is waited for
            await store(sim, engine, f"turn of {family}", tokens(family, 6))
        await store(sim, engine, "new", tokens(3, 7))
        found = engine.runtime.lookup((*tokens(2, 6), 9))
        expect(sim, found.num_device_tokens == 6, f"what was touched last is gone: {found}")
        for index in range(4):
            serve(sim, engine, f"r{index}", tokens(1 + index, sim.random.randint(3, 8), shared=2))
        await after(sim, engine)


class NewestFirst:
    """Evicts what was touched last: heads before their tails."""

    def __init__(self) -> None:
        self._order = LeastRecentlyUsed()
        self.add, self.add_newer, self.add_back = self._order.add, self._order.add_newer, self._order.add_back
        self.remove = self._order.remove

    def oldest(self) -> Part | None:
        return [None, *self._order][-1]

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        return False

    def __iter__(self) -> Iterator[Part]:
        return iter(self._order)


@scenario("request_done")
async def evicted_otherwise(sim: Simulation) -> None:
    """A custom eviction order takes heads before their tails: blocks after a gap do not hit, and do no harm."""
    engine = sim.runtime(
        num_device_blocks=8, num_host_blocks=sim.random.choice((5, 16)), eviction=NewestFirst,
        max_job_bytes=sim.random.choice((1, 100)),
    )  # fmt: skip
    async with engine.runtime:
        for index in range(6):
            prompt = tokens(index % 2, sim.random.randint(4, 11), branch=index % 3, shared=4)
            serve(sim, engine, f"r{index}", prompt, num_new_tokens=index % 2)
        await after(sim, engine)


@scenario(
    "load_overlap_confirmed",
    "load_overlap_invalid",
    "request_loading",
    faults=("fail", "vanish", "refuse", "hang", "die"),
)
async def early_starts(sim: Simulation) -> None:
    """Forwards that begin while their load is under way, next to others that compute the same, with hardly any room."""
    windows: dict[str, Any] = {"block_sizes": (2, 2), "attention": (FullAttention(), SlidingWindow(4))}
    is_windowed = sim.random.random() < 0.3
    engine = sim.runtime(
        num_device_blocks=sim.random.choice((10, 14)) + 10 * is_windowed, num_host_blocks=sim.random.choice((6, 12)),
        max_job_bytes=sim.random.choice((1, 2, 100)), max_jobs_in_flight=sim.random.choice((1, 4)),
        **(windows if is_windowed else {}),
    )  # fmt: skip
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)
        for index in range(4):
            prompt = tokens(1, sim.random.randint(6, 9), branch=index % 2, shared=6)
            serve(sim, engine, f"r{index}", prompt, starts_early=index != 2, num_new_tokens=index % 2)
        serve(sim, engine, "again", tokens(1, 8), reads_cache=False)
        bystanders(sim, engine, 2)
        if sim.random.random() < 0.5:
            canceller(sim, engine, "r0", "r1")
        await after(sim, engine)


@scenario("job_completed", faults=("vanish", "lose", "fail"))
async def stored_twice(sim: Simulation) -> None:
    """Incident I3: requests hit device blocks while they are being stored, and again when the store has failed."""
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

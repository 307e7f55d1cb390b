"""Pins, prefetches and demotions, among requests."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio

from aoffload import FullAttention, OutOfBlocks, SlidingWindow
from aoffload.ledger import PinState
from aoffload.testing import Client, SimulatedEngine, Simulation, Violation

from .common import after, ask, bystanders, canceller, evict_device, expect, is_calm, serve, store, tokens
from .table import scenario


async def keep(sim: Simulation, engine: SimulatedEngine, prompt: tuple[int, ...], ttl_s: float) -> None:
    """Hold a pin for a while: as long as it is held, what it matched hits."""
    pin = engine.runtime.pins.hold(prompt, ttl_s)
    try:
        with suppress(OutOfBlocks), pin:
            for _ in range(4):
                await sim.sleep(sim.random.choice((0.0, 0.001, 0.004, 0.01)))
                found = engine.runtime.lookup((*prompt, 1_000_000))
                is_kept = pin.state is PinState.HELD and not engine.num_invalidations and not sim.faults.fired
                if is_kept and found.num_tokens < pin.match.num_tokens:
                    raise Violation("a pin that keeps nothing", f"{pin} and {found}")
    finally:
        if pin.state is PinState.HELD:
            raise Violation("a leak", f"{pin} outlives its block")


async def fetch(sim: Simulation, engine: SimulatedEngine, prompt: tuple[int, ...]) -> None:
    if sim.random.random() < 0.3:
        pending = engine.runtime.transfers.prefetch(prompt)
        await sim.jitter()
        if sim.random.random() < 0.5:
            pending.cancel()
        await pending.wait()
        if not engine.runtime._session.is_open:
            raise Violation("nobody was told", f"{pending} was waited for to the end by a runtime that closes")
    elif (found := await engine.runtime.transfers.prefetch(prompt).wait()) >= len(prompt):
        raise Violation("hit cap", f"{found} tokens of {len(prompt)} fetched")


async def send_away(sim: Simulation, engine: SimulatedEngine, prompt: tuple[int, ...]) -> None:
    way = sim.random.randrange(3)
    if way == 0:
        engine.runtime.transfers.demote(prompt)  # goes on by itself
    elif way == 1:
        with engine.runtime.transfers.demote(prompt) as pending:
            await sim.jitter()
            await pending.wait()
    else:
        await engine.runtime.transfers.demote(prompt).wait()


async def ask_in_vain(sim: Simulation, engine: SimulatedEngine, prompt: tuple[int, ...]) -> None:
    """A task that is cancelled already gets its cancellation before it waits, and its transfer is given up."""
    ask_for = sim.random.choice((engine.runtime.transfers.prefetch, engine.runtime.transfers.demote))
    with anyio.CancelScope() as scope:
        scope.cancel()
        with ask_for(prompt) as pending:
            await pending.wait()
        raise Violation("deaf to a cancellation", f"{ask_for} came to its end")


def transfers(
    sim: Simulation, engine: SimulatedEngine, prompts: list[tuple[int, ...]], number: int = 4, num_turns: int = 3
) -> None:
    """Spawn clients that pin, prefetch and demote, one after the other."""
    for index in range(number):

        async def run(client: Client) -> None:
            for _ in range(num_turns):
                await sim.jitter()
                prompt = sim.random.choice(prompts)
                call = sim.random.randrange(7)
                if call < 2:
                    await keep(sim, engine, prompt, sim.random.choice((0.002, 0.01, 60.0)))
                elif call < 4:
                    await fetch(sim, engine, prompt)
                elif call < 6:
                    await send_away(sim, engine, prompt)
                else:
                    await ask_in_vain(sim, engine, prompt)

        sim.spawn(f"transfer{index}", run)


@scenario("pin_held", "pin_lapsed", "prefetch_done", "demotion_done", faults=("fail", "refuse", "vanish", "hang"))
async def keeping(sim: Simulation) -> None:
    """Pins, prefetches and demotions of prompts that requests want, too; there is room for half of them."""
    rng = sim.random
    engine = sim.runtime(
        num_device_blocks=rng.choice((9, 14)), num_host_blocks=rng.choice((0, 6, 16)),
        max_job_bytes=rng.choice((1, 2, 100)), max_jobs_in_flight=rng.choice((1, 4)),
        max_pinned_share=rng.choice((0.5, 1.0)), max_prefetch_share=rng.choice((0.25, 1.0)),
        verify=rng.random() < 0.3, store_policy=rng.choice(("eager", "eager", "off")),
    )  # fmt: skip
    prompts = [tokens(index // 2, length, branch=index % 2) for index, length in enumerate((9, 7, 6, 8))]
    async with engine.runtime:
        for index in range(2):
            await store(sim, engine, f"first{index}", prompts[index])
        await evict_device(engine)
        transfers(sim, engine, prompts)
        for index in range(5):
            serve(sim, engine, f"r{index}", rng.choice(prompts), num_new_tokens=index % 2)
        if rng.random() < 0.5:
            canceller(sim, engine, "r0", "r3")
        await after(sim, engine)


@scenario("pin_yielded", "request_done")
async def pinned_full(sim: Simulation) -> None:
    """Pins that keep the whole device: every request that fits is served all the same, before any pin expires."""
    engine = sim.runtime(num_device_blocks=9, num_host_blocks=sim.random.choice((0, 12)), max_pinned_share=1.0)
    async with engine.runtime:
        for family in range(3):
            await store(sim, engine, f"first{family}", tokens(family, 5))
        began = anyio.current_time()
        for family in range(3):

            async def holds(client: Client, family: int = family) -> None:
                await keep(sim, engine, tokens(family, 5), 3600.0)

            async def keeps(client: Client, family: int = family) -> None:
                """The client's request has to get past the client's own pin."""
                with engine.runtime.pins.hold(tokens(family, 5), 3600.0):
                    await engine.serve(client.name, ask(sim, engine, tokens(9 + family, 13)))

            sim.spawn(f"holds{family}", holds)
            sim.spawn(f"keeps{family}", keeps)
        bystanders(sim, engine, 2)
        await after(sim, engine)
        took = anyio.current_time() - began
        expect(sim, took < 60, f"{took} s to serve five requests")


@scenario("pin_held", "prefetch_done", "demotion_done", faults=("fail", "vanish", "hang", "lose"))
async def kept_windows(sim: Simulation) -> None:
    """Pins, prefetches and demotions with windows, while the cache is reset or the runtime is closed."""
    rng = sim.random
    options: dict[str, Any] = {"max_prefetch_share": 1.0, "store_policy": rng.choice(("eager", "off"))}
    engine = sim.runtime(
        num_device_blocks=rng.choice((18, 26)), num_host_blocks=rng.choice((10, 24)), block_sizes=(2, 2),
        attention=(FullAttention(), SlidingWindow(4)), max_job_bytes=rng.choice((1, 100)), **options,
    )  # fmt: skip
    prompts = [tokens(1, 9, branch=index, shared=5) for index in range(2)]
    async with engine.runtime:
        await store(sim, engine, "first", prompts[0])
        await evict_device(engine)
        transfers(sim, engine, prompts, number=3)
        for index in range(3):
            serve(sim, engine, f"r{index}", prompts[index % 2], num_new_tokens=index)
        if rng.random() < 0.4:

            async def resets(client: Client) -> None:
                await sim.jitter()
                engine.forget_everything()
                await engine.runtime.reset()

            sim.spawn("resets", resets)
        elif rng.random() < 0.3 and is_calm(sim):
            for client in sim.clients:
                client.may_abort = (*client.may_abort, "runtime_closed")
            await sim.jitter()
            return
        await after(sim, engine)


@scenario("prefetch_done", "demotion_done", "request_loading", faults=("fail", "refuse", "hang", "vanish"))
async def sent_away_and_back(sim: Simulation) -> None:
    """Four sessions on a device that holds two: each is demoted after a turn, and prefetched before the next one."""
    rng = sim.random
    engine = sim.runtime(
        num_device_blocks=rng.choice((10, 14)), num_host_blocks=rng.choice((10, 20)), store_policy="off",
        max_job_bytes=rng.choice((1, 100)), max_jobs_in_flight=rng.choice((1, 4)), max_prefetch_share=1.0,
    )  # fmt: skip
    async with engine.runtime:
        for index in range(4):
            prompt = tokens(index, 6 + index % 2)

            async def session(client: Client, prompt: tuple[int, ...] = prompt) -> None:
                for turn in range(2):
                    await sim.jitter()
                    if turn:
                        await fetch(sim, engine, prompt)
                    await client.serve(engine, ask(sim, engine, prompt, waits=True))
                    await send_away(sim, engine, prompt)

            sim.spawn(f"session{index}", session)
        await after(sim, engine)

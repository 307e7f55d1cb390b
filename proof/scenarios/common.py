"""Shared parts of the scenarios: prompts, clients, and ways to free blocks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from aoffload import OutOfBlocks
from aoffload.testing import Ask, Client, SimulatedEngine, Simulation, Violation


def is_calm(sim: Simulation) -> bool:
    """Whether nothing is injected: exact numbers may be expected."""
    return not sim.plan.cancels and not sim.plan.faults


def expect(sim: Simulation, truth: bool, message: str) -> None:
    """Check what holds unless something is injected."""
    if is_calm(sim) and not truth:
        raise Violation("expectation", message)


def style(sim: Simulation, engine: SimulatedEngine) -> Any:
    """Where a forward may run: a thread that is awaited inside a plain step is not safe from native cancellation."""
    if engine.transport.stream is not None:
        return "stream"
    return sim.random.choice(("inline", "thread") if sim.is_native else ("inline", "step", "thread"))


def tokens(family: int, num_tokens: int, branch: int = 0, shared: int = 4) -> tuple[int, ...]:
    """Prompts of one family share their first `shared` tokens, and all of them within a branch."""
    return tuple(family * 100 + index + (0 if index < shared else branch * 50) for index in range(num_tokens))


def ask(sim: Simulation, engine: SimulatedEngine, prompt: tuple[int, ...], **options: Any) -> Ask:
    rng = sim.random
    options.setdefault("style", style(sim, engine))
    options.setdefault("slice_tokens", rng.choice((2, 3, 100)))
    options.setdefault("waits", rng.random() < 0.7)
    return Ask(tokens=prompt, **options)


def serve(sim: Simulation, engine: SimulatedEngine, name: str, prompt: tuple[int, ...], **options: Any) -> Client:
    """Spawn a client that arrives some time soon and is served once."""
    wanted = ask(sim, engine, prompt, **options)

    async def run(client: Client) -> None:
        await sim.jitter()
        await client.serve(engine, wanted)

    return sim.spawn(name, run)


def bystanders(sim: Simulation, engine: SimulatedEngine, number: int = 3, num_tokens: int = 6) -> None:
    """Spawn other clients, with prompts of their own."""
    for index in range(number):
        family = 50 + sim.random.randrange(2)
        length = sim.random.randint(2, num_tokens)
        serve(sim, engine, f"by{index}", tokens(family, length, branch=sim.random.randrange(2)))


async def store(sim: Simulation, engine: SimulatedEngine, name: str, prompt: tuple[int, ...]) -> None:
    """Serve a prompt in this task and wait until it is in host memory."""
    await engine.serve(name, ask(sim, engine, prompt))
    await engine.runtime.flush()


def canceller(sim: Simulation, engine: SimulatedEngine, *names: str) -> None:
    """Spawn a client that cancels others, one after the other."""

    async def cancel(client: Client) -> None:
        for name in names:
            await sim.jitter()
            engine.runtime.cancel(name)

    for client in sim.clients:
        if client.name in names:
            client.may_abort = (*client.may_abort, "cancelled")
    sim.spawn("canceller", cancel)


async def evict_device(engine: SimulatedEngine) -> None:
    """Give every unpinned device block to another request for a moment."""
    pool, layout = engine.runtime.statistics().device, engine.runtime.ledger.layout
    num_tokens = max(1, (pool.num_free + pool.num_cached) // layout.width * layout.unit_tokens)
    async with engine.runtime.request((7, 7)) as request:
        with suppress(OutOfBlocks):  # another request was faster: that evicts, too
            request.allocate_nowait(num_tokens)


async def after(sim: Simulation, engine: SimulatedEngine) -> None:
    """Wait until all clients are over and their stores have landed."""
    await sim.join()
    await engine.runtime.flush()

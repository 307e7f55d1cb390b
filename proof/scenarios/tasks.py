"""Requests that are served by several tasks and threads at once, or by a device that computes later."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import anyio

from aoffload import RequestState, RuntimeClosed
from aoffload._runtime.loading import PendingLoad
from aoffload._runtime.request import Request
from aoffload.errors import AoffloadError, WrongState
from aoffload.testing import Ask, Client, ForwardFailed, SimulatedEngine, Simulation
from aoffload.testing.device import SimulatedFence

from .common import after, ask, bystanders, evict_device, serve, store, tokens
from .table import scenario


@scenario("request_loading", faults=("hang", "fail", "vanish", "lose"))
async def two_tasks(sim: Simulation) -> None:
    """Two tasks of one request wait for its load, which others share: all of them are told of its end."""
    engine = sim.runtime(num_device_blocks=14, num_host_blocks=8, max_job_bytes=sim.random.choice((1, 100)))
    async with engine.runtime:
        await store(sim, engine, "first", tokens(1, 8))
        await evict_device(engine)

        async def both(client: Client) -> None:
            wanted = ask(sim, engine, tokens(1, sim.random.randint(5, 9)))
            async with engine.open(client.name, wanted) as request:
                client.request = request
                await request.allocate()
                num_ready = await _wait_twice(request.load_nowait())
                engine.check_ready(request, wanted, wanted.tokens, num_ready)
                await engine.prefill(request, wanted, num_ready)
            client.ended()

        for index in range(2):
            sim.spawn(f"both{index}", both)
            serve(sim, engine, f"r{index}", tokens(1, 9))
        await after(sim, engine)


async def _wait_twice(pending: PendingLoad) -> int:
    """Let two tasks wait for one load. Returns what both are told, or raises the first error."""
    found: list[int] = []
    errors: list[AoffloadError] = []

    async def wait() -> None:
        try:
            found.append(await pending.wait())
        except AoffloadError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(wait, name="waits for a load")
    if errors:
        raise errors[0]
    assert found[0] == found[1], f"one load, two answers: {found}"
    return found[0]


@scenario("request_aborted")
async def overlapping_steps(sim: Simulation) -> None:
    """Several forwards of one request at a time, in threads of other tasks: its blocks stay until all are over."""
    engine = sim.runtime(num_device_blocks=8, num_host_blocks=4)
    async with engine.runtime:
        for index in range(2):
            _serve_by_others(sim, engine, f"r{index}", ask(sim, engine, tokens(index, 6), style="thread"))
        bystanders(sim, engine, 4)
        await after(sim, engine)


def _serve_by_others(sim: Simulation, engine: SimulatedEngine, name: str, wanted: Ask) -> None:
    """Spawn a client that only holds the request, and two that compute for it; none waits for the others to end."""
    begun = anyio.Event()
    held: list[Request] = []

    async def owner(client: Client) -> None:
        try:
            async with engine.open(name, wanted) as request:
                client.request = request
                await request.allocate()
                await request.load()
                held.append(request)
                begun.set()
                await sim.jitter()
            client.ended()
        finally:
            begun.set()

    async def forward(client: Client) -> None:
        await begun.wait()
        for request in held:
            start = request.num_computed_tokens
            with suppress(WrongState, RuntimeClosed, ForwardFailed):
                await engine.forward(request, wanted, wanted.tokens, start, len(wanted.tokens))

    sim.spawn(name, owner).may_abort = ("closed_early",)
    for index in range(2):
        sim.spawn(f"{name} forward {index}", forward)


@scenario("request_done")
async def threads_left(sim: Simulation) -> None:
    """Tasks are cancelled natively, over and over, while threads compute for them: blocks of a thread stay in place."""
    engine = sim.runtime(num_device_blocks=7, num_host_blocks=4)
    async with engine.runtime:
        victims = []
        for index in range(5):
            prompt = tokens(index % 3, sim.random.randint(4, 8))
            victims.append(serve(sim, engine, f"r{index}", prompt, style="thread", slice_tokens=2))

        async def cancel(client: Client) -> None:
            for victim in sim.random.sample(victims, 3):
                await sim.jitter()
                for _ in range(sim.random.randrange(6)):
                    await anyio.lowlevel.checkpoint()
                if victim.is_running:
                    victim.cancel("native")

        sim.spawn("cancel", cancel)
        await after(sim, engine)


@scenario("request_loading", faults=("refuse", "fail"))
async def computed_later(sim: Simulation) -> None:
    """Tokens that are committed after a fence of the engine are stored once that has passed, and not before."""
    engine = sim.runtime(num_device_blocks=14, num_host_blocks=14)
    async with engine.runtime:
        fences: list[SimulatedFence] = []
        asks = [ask(sim, engine, tokens(index, 6), style="inline") for index in range(3)]
        for index, wanted in enumerate(asks):

            async def commit_first(client: Client, wanted: Ask = wanted) -> None:
                await sim.jitter()
                async with engine.open(client.name, wanted) as request:
                    client.request = request
                    await request.allocate()
                    await request.load()
                    fences.append(_compute_later(sim, engine, request, wanted))
                    request.commit(len(wanted.tokens), after=fences[-1])
                    engine.note_commit(request, wanted, wanted.tokens, len(wanted.tokens))
                    await sim.jitter()
                client.ended()

            sim.spawn(f"r{index}", commit_first)
        await after(sim, engine)
        for fence in fences:
            computed = anyio.Event()
            fence.when_passed(computed.set)
            await computed.wait()
        await evict_device(engine)
        for index, wanted in enumerate(asks):
            serve(sim, engine, f"again{index}", (*wanted.tokens, 9))
        await after(sim, engine)


def _compute_later(sim: Simulation, engine: SimulatedEngine, request: Request, wanted: Ask) -> SimulatedFence:
    """Schedule a forward over the whole prompt, and return the fence after it. A step holds the blocks until then."""
    assert request.state is RequestState.RUNNING
    fence, held, table = SimulatedFence(), ExitStack(), request.block_ids
    held.enter_context(engine.runtime.step([request]))

    def compute() -> None:
        engine._compute(request, wanted, table, wanted.tokens, 0, len(wanted.tokens))
        held.close()
        fence.let_pass()

    sim.scheduler.act("the device computes", compute, sim.random.choice((0.0, 0.005, 0.05, 0.2)))
    return fence

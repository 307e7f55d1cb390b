"""Requests that are preempted and come back, with copies in flight and both pools nearly full."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from aoffload import FullAttention, RequestState, SlidingWindow, WrongState
from aoffload.testing import Client, SimulatedEngine, Simulation

from .common import after, ask, bystanders, evict_device, serve, store, tokens
from .table import scenario

_S = RequestState
_TO_PREEMPT = (_S.LOADING, _S.DRAINING, _S.REQUEUED, _S.STRANDED, _S.RUNNING)


@scenario("request_preempted", "request_done", faults=("fail", "refuse", "vanish"))
async def preemption_storm(sim: Simulation) -> None:
    """All requests are preempted at random points, device and host nearly full: all go on where they were."""
    rng = sim.random
    engine = sim.runtime(
        num_device_blocks=10, num_host_blocks=rng.choice((2, 8, 14)), max_job_bytes=rng.choice((1, 100)),
        max_jobs_in_flight=rng.choice((1, 4)),
    )  # fmt: skip
    async with engine.runtime:
        for index in range(5):
            options: dict[str, Any] = {"num_preemptions": rng.randint(1, 3), "slice_tokens": rng.choice((2, 3))}
            serve(sim, engine, f"r{index}", tokens(index % 3, rng.randint(4, 9)), num_new_tokens=index % 3, **options)
        await after(sim, engine)


@scenario("request_preempted", "request_done", faults=("fail", "lose", "rot"))
async def preempted_windows(sim: Simulation) -> None:
    """Preemptions with windows: blocks that have left a window are not needed back."""
    rng = sim.random
    engine = sim.runtime(
        num_device_blocks=20, num_host_blocks=rng.choice((6, 20)), block_sizes=(2, 2), verify=rng.random() < 0.3,
        attention=(FullAttention(), SlidingWindow(4)),
    )  # fmt: skip
    async with engine.runtime:
        for index in range(4):
            options: dict[str, Any] = {"num_preemptions": rng.randint(1, 3), "slice_tokens": rng.choice((2, 3))}
            serve(sim, engine, f"r{index}", tokens(index % 2, rng.randint(6, 10)), num_new_tokens=index % 3, **options)
        await after(sim, engine)


async def goes_on(sim: Simulation, engine: SimulatedEngine, client: Client) -> None:
    """A request that another client may preempt whenever it waits: it resumes and goes on."""
    prompt = tokens(sim.random.randrange(2), 8)
    wanted = ask(sim, engine, prompt)
    await sim.jitter()
    async with engine.open(client.name, wanted) as request:
        client.request = request
        await request.allocate()
        start = await request.load()
        while start < len(prompt):
            if request.state is RequestState.PREEMPTED:
                await sim.jitter()
                if sim.random.random() < 0.1:
                    client.cancel("scope")  # arrives in `resume`
                start = await request.resume()
                continue
            stop = min(len(prompt), start + wanted.slice_tokens)
            with suppress(WrongState):  # preempted between two tries of a forward that fails
                await engine.forward(request, wanted, prompt, start, stop)
            if request.state is RequestState.RUNNING:  # else what it has computed is gone
                engine.commit(request, wanted, prompt, stop)
                start = stop
    client.ended()


@scenario("request_preempted", "request_loading", "request_done", faults=("fail", "lose", "vanish", "hang"))
async def preempted_by_another(sim: Simulation) -> None:
    """A scheduler preempts requests that wait for a load, for room after a lost one, or for a forward in a thread."""
    rng = sim.random
    engine = sim.runtime(num_device_blocks=rng.choice((8, 10)), num_host_blocks=14)
    async with engine.runtime:
        for family in range(2):
            await store(sim, engine, f"first{family}", tokens(family, 7))
        await evict_device(engine)
        owners = [sim.spawn(f"r{index}", lambda client: goes_on(sim, engine, client)) for index in range(3)]

        async def preempts(client: Client) -> None:
            for _ in range(6):
                await sim.jitter()
                for owner in owners:
                    request = owner.request
                    if request is not None and request.state in _TO_PREEMPT:
                        with suppress(WrongState):  # it may be over before its step is
                            await request.preempt()

        sim.spawn("preempts", preempts)
        bystanders(sim, engine, 2)
        await after(sim, engine)

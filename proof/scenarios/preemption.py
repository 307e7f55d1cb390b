"""Requests that are preempted and come back, with copies in flight and both pools nearly full."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio

from aoffload import (
    CommitError,
    FullAttention,
    OutOfBlocks,
    RequestAborted,
    RequestState,
    RuntimeClosed,
    SlidingWindow,
    WrongState,
)
from aoffload.testing import Ask, Client, SimulatedEngine, Simulation, Violation

from .common import after, ask, bystanders, evict_device, serve, store, tokens
from .table import scenario

_S = RequestState
_OF_OTHERS = (WrongState, RequestAborted, RuntimeClosed, OutOfBlocks)
"""A task that uses a request of another one finds it in any state, over, or without room."""
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


async def serve_and_resume(sim: Simulation, engine: SimulatedEngine, client: Client) -> None:
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
        owners = [sim.spawn(f"r{index}", lambda client: serve_and_resume(sim, engine, client)) for index in range(3)]

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


class Victim:
    """A request whose forwards run in threads, while a scheduler's task preempts it and brings it back."""

    def __init__(self, sim: Simulation, engine: SimulatedEngine, family: int) -> None:
        self.sim, self.engine = sim, engine
        self.prompt = tokens(family, sim.random.randint(6, 9))
        self.wanted: Ask = ask(sim, engine, self.prompt, style="thread", slice_tokens=2)
        self.is_away: anyio.Event | None = None
        """Set when the scheduler is through with it."""
        self.num_ready = 0
        self.client = sim.spawn(f"victim{family}", self.serve)

    async def serve(self, client: Client) -> None:
        await self.sim.jitter()
        async with self.engine.open(client.name, self.wanted) as request:
            client.request = request
            await request.allocate()
            self.num_ready = await request.load()
            start = self.num_ready
            while start < len(self.prompt):
                if request.state is not _S.RUNNING:
                    start = await self._has_blocks_again()
                    continue
                stop = min(len(self.prompt), start + self.wanted.slice_tokens)
                await self.engine.forward(request, self.wanted, self.prompt, start, stop)
                start = stop if await self._commits(stop) else await self._has_blocks_again()
        client.ended()

    async def _commits(self, stop: int) -> bool:
        """At once, when nobody can have come between; or late, when all of it may be lost."""
        request = self.client.request
        assert request is not None
        if self.sim.random.random() < 0.6:
            if request.state is not _S.RUNNING:
                raise Violation("taken from a step", f"{request} between its forward and its commit")
            self.engine.commit(request, self.wanted, self.prompt, stop)
            return True
        await self.sim.jitter()
        with suppress(CommitError, WrongState):
            self.engine.commit(request, self.wanted, self.prompt, stop)
            return True
        return False

    async def _has_blocks_again(self) -> int:
        """How much is ready, once it may compute. A scheduler that was cancelled leaves the rest to its own task."""
        request = self.client.request
        assert request is not None
        if self.is_away is not None:
            await self.is_away.wait()
        while request.state is not _S.RUNNING:
            if request.state is _S.STRANDED:  # no room for blocks of its own after a lost load: it waits for some
                await request.preempt()
            if request.state is _S.PREEMPTED:
                self.num_ready = await request.resume()
                continue
            if request.state is _S.PINNED:
                await request.allocate()
            self.num_ready = await request.load()
        return self.num_ready

    async def sent_away_and_back(self) -> None:
        """Called by another task: waits for the step that is under way, then takes its blocks, and gets others."""
        request = self.client.request
        if request is None or request.state is not _S.RUNNING:
            return
        self.is_away = anyio.Event()
        try:
            with suppress(*_OF_OTHERS):
                await request.preempt()
                await self.sim.jitter()
                self.num_ready = await request.resume()
                self.engine.check_ready(request, self.wanted, self.prompt, self.num_ready)
        finally:
            self.is_away.set()
            self.is_away = None


@scenario("request_preempted", "request_done", faults=("fail", "lose", "vanish"))
async def resumed_by_another(sim: Simulation) -> None:
    """A scheduler preempts and resumes requests whose forwards are in threads: never between a step and its commit, and
    what a forward wrote into blocks that are lost is read by nobody."""
    engine = sim.runtime(num_device_blocks=sim.random.choice((8, 12)), num_host_blocks=14)
    async with engine.runtime:
        victims = [Victim(sim, engine, family) for family in range(2)]

        async def schedules(client: Client) -> None:
            for _ in range(5):
                await sim.jitter()
                for victim in victims:
                    await victim.sent_away_and_back()

        sim.spawn("schedules", schedules)
        bystanders(sim, engine, 2)
        await sim.join()
        for victim in victims:
            serve(sim, engine, f"again {victim.client.name}", (*victim.prompt, 9))
        await after(sim, engine)

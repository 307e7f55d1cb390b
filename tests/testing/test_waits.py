"""The checks of waits and of threads: they detect waits that never end and threads that are left over."""

from __future__ import annotations

from typing import Any

import pytest

from aoffload import Request
from aoffload.testing import Ask, Client, Plan, Simulation, Violation, simulate

BACKENDS: Any = pytest.mark.parametrize("backend", ["asyncio", "trio"])
WANTED = Ask(tokens=(1, 2, 3, 4, 5, 6))


async def load_with(sim: Simulation, patience: Any) -> None:
    """One request loads from the host; `patience` spoils how it waits."""
    engine = sim.runtime(num_device_blocks=4)
    async with engine.runtime:
        await engine.serve("first", WANTED)
        await engine.runtime.flush()
        async with engine.runtime.request((9,)) as other:
            other.allocate_nowait(8)
        async with engine.open("r", WANTED) as request:
            await request.allocate()
            patience(request)
            await request.load()


@BACKENDS
def test_who_sleeps_on_what_is_over_is_found(backend: Any) -> None:
    """A load ends and its request is not woken: noticed before time passes, not when a bound has run out."""

    def deafen(request: Any) -> None:
        request.__class__ = Deaf

    result = simulate(Plan(scenario="deaf", backend=backend), lambda sim: load_with(sim, deafen))
    assert result.violation is not None
    assert result.violation.oracle == "nobody was woken"
    assert result.time_s < 1.0


class Deaf(Request):
    __slots__ = ()

    def _wake(self) -> None:
        pass


@BACKENDS
def test_a_load_that_is_waited_for_without_a_bound_is_found(backend: Any) -> None:
    """A copy hangs; a request that waits for it longer than `load_timeout_s` has no bound."""

    def wait_for_ever(request: Any) -> None:
        object.__setattr__(request._session, "config", Unbounded(request._session.config))

    plan = Plan.parse(f"scenario=unbounded backend={backend} fault=hang@1+")
    result = simulate(plan, lambda sim: load_with(sim, wait_for_ever))
    assert result.violation is not None
    assert result.violation.oracle == "a wait past its bound"


class Unbounded:
    """A configuration whose bound for loads is found by oracles only."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._num_asked = 0

    def __getattr__(self, name: str) -> Any:
        if name == "load_timeout_s":
            self._num_asked += 1
            return None if self._num_asked == 1 else self._config.load_timeout_s
        return getattr(self._config, name)


@BACKENDS
def test_a_violation_in_a_thread_that_nobody_waits_for(backend: Any) -> None:
    """The task that started a thread is gone when the thread meets a broken promise: it is found all the same."""

    def work() -> None:
        raise Violation("ownership", "somebody else's block")

    async def scenario(sim: Simulation) -> None:
        async def leave(client: Client) -> None:
            await sim.env.run_in_thread(work)

        sim.spawn("r", leave)
        await sim.join()

    for seed in range(5):
        plan = Plan.parse(f"scenario=thread backend={backend} seed={seed} cancel=r@1:native")
        result = simulate(plan, scenario)
        assert result.violation is not None
        assert result.violation.oracle == "ownership"


def test_others_go_on_while_a_thread_works() -> None:
    """A thread that is in the middle of its work is met there by what other tasks do."""
    seen: set[int] = set()

    async def scenario(sim: Simulation) -> None:
        steps = [0]

        def work() -> None:
            before = steps[0]
            sim.env.meanwhile()
            seen.add(steps[0] - before)

        async def count(client: Client) -> None:
            for _ in range(30):
                await sim.sleep(0.0)
                steps[0] += 1

        async def think(client: Client) -> None:
            await sim.env.run_in_thread(work)

        sim.spawn("count", count)
        sim.spawn("think", think)
        await sim.join()

    for seed in range(20):
        assert simulate(Plan(scenario="middle", seed=seed), scenario).violation is None
    assert len(seen) > 2

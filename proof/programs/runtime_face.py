"""Programs over the runtime: its whole public surface, in the simulated loop of asyncio or trio."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator, Mapping

import attrs

from aoffload.testing.faults import DISK_FAULTS, Fault
from aoffload.testing.plans import Plan
from aoffload.testing.simulation import Simulation, undisturbed, violation_of
from aoffload.testing.violations import Violation

from .engine_runtime_clients import EngineDirector
from .engine_runtime_draw import EngineDrawing, draw_engine_options, draw_engine_world, draw_engine_world_with_states
from .program import Call, Face, Outcome, Program, World
from .runtime_director import Director
from .runtime_draw import Drawing, draw_opening, draw_runtime_world, draw_runtime_world_with_states

__all__ = ["draw_and_run", "run_runtime_program"]


@attrs.frozen
class _Kind:
    """How programs over one kind of runtime are drawn and run."""

    director: Callable[[Program, Simulation], Director] = Director
    draw: Callable[[random.Random, Director], Drawing] = Drawing
    world: Callable[[random.Random], World] = draw_runtime_world
    options: Callable[[random.Random], list[Call]] = lambda rng: []


_OURS, _ENGINES = _Kind(), _Kind(EngineDirector, EngineDrawing, draw_engine_world, draw_engine_options)
_STATES = attrs.evolve(_OURS, world=draw_runtime_world_with_states)
_ENGINE_STATES = attrs.evolve(_ENGINES, world=draw_engine_world_with_states)
KINDS: Mapping[str, _Kind] = {
    "asyncio": _OURS, "trio": _OURS, "engine-asyncio": _ENGINES, "engine-trio": _ENGINES,
    "asyncio-states": _STATES, "trio-states": _STATES,
    "engine-asyncio-states": _ENGINE_STATES, "engine-trio-states": _ENGINE_STATES,
}  # fmt: skip


def run_runtime_program(program: Program) -> Outcome:
    """Run a program over a runtime. The same program gives the same outcome in every process."""
    return _undisturbed(program, lambda director: iter(program.calls))[1]


def draw_and_run(face: Face, seed: int, num_calls: int, taken: list[str] | None = None) -> tuple[Program, Outcome]:
    """Draw and run a program of about `num_calls` calls; `seed` decides everything. A call is drawn when those before
    it were made, so that most of them fit. Running the program again has the same outcome. `taken`: see `Stage`."""
    rng = random.Random(f"program {face} {seed}")
    kind = KINDS[face]
    world = kind.world(rng)
    opening = Program(face, world, (*draw_opening(rng, world), *kind.options(rng)), seed)

    def calls(director: Director) -> Iterator[Call]:
        director.taken = taken
        return itertools.chain(opening.calls, kind.draw(rng, director).calls(num_calls))

    return _undisturbed(opening, calls)


def _undisturbed(program: Program, calls_for: Callable[[Director], Iterator[Call]]) -> tuple[Program, Outcome]:
    with undisturbed():
        found = _run(program, calls_for)
        if found[1].violation is not None or "worker" in found[1].features:
            gc.collect()  # what a broken-off run leaves behind, or a task that was cancelled before it began
    return found


def _run(program: Program, calls_for: Callable[[Director], Iterator[Call]]) -> tuple[Program, Outcome]:
    """Run the calls of `calls_for`; the program with the calls that were made. `program` need only have those that
    configure the run."""
    faults = tuple(Fault(**call.args) for call in program.calls if call.name == "fault")
    backend = program.face.removeprefix("engine-").removesuffix("-states")
    simulation = Simulation(Plan(scenario="program", backend=backend, seed=program.seed, faults=faults))  # type: ignore[arg-type]
    director, made = KINDS[program.face].director(program, simulation), list[Call]()

    def noted() -> Iterator[Call]:
        for call in calls_for(director):
            made.append(call)
            yield call

    async def scenario(_: Simulation) -> None:
        await director.run(noted())

    violation = violation_of(simulation, scenario)
    if violation is None:
        try:
            director.check_end()
        except Violation as found:
            violation = found
    fired = ("disk fault" if kind in DISK_FAULTS else kind for kind in simulation.faults.fired)
    director.features.update(fired, _features_of(program))
    outcome = Outcome(violation, director.num_calls, frozenset(director.features), director.digest)
    return program.with_calls(made), outcome


def _features_of(program: Program) -> set[str]:
    """The features of the program's world and configuration."""
    world = program.world
    found = {shape.kind for shape in world.groups} | {world.store_policy.partition(":")[0], world.eviction}
    if len(world.groups) > 1:
        found.add("groups")
    if not world.num_host_blocks:
        found.add("no host")
    if world.num_disk_blocks:
        found.add("disk")
    if any(call.args.get("verify") for call in program.calls if call.name == "configure"):
        found.add("verify")
    found |= {f"load by {choice}" for call in program.calls if (choice := call.args.get("load_choice"))}
    return found

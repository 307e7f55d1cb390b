"""Exploring: programs from seeds, what they meet, what they break; replay from one line, and the shortest program."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ...arguments import check_callable, check_int, check_type, shown
from ...errors import InvalidArgument
from ..violations import Violation
from .engine_draw import EngineDraw
from .engine_machine import EngineMachine
from .ledger_machine import LedgerMachine
from .ledger_stories import LedgerStories
from .machine import Machine
from .outcome import Outcome
from .program import Call, Face, Program, World, check_face, draw_world
from .shortening import shorten

__all__ = [
    "Broken",
    "ProgramTally",
    "call",
    "check_program",
    "explore_programs",
    "program_of",
    "replay_program",
    "run_program",
]

NUM_CALLS = 60
LINE = re.compile(r"(?P<face>ledger|engine|asyncio|trio) seed=(?P<seed>[0-9]+)(?: calls=(?P<calls>[1-9][0-9]*))?")
WHOLE_EVERY = 4
"""Calls of a drawn program after which the whole ledger is looked at. A program that is run again, to be made short or
as a test, is looked at after each: the fewest calls that break a law are none that only wait for the next look."""
LOOKS_AT_REFUSALS = 8
"""One in so many programs is run again, to see that what was refused has changed nothing."""


@attrs.frozen
class _Kind:
    """How programs over one kind of ledger are drawn and run."""

    machine: Callable[..., Machine]
    draw: Callable[[random.Random, Any], Any]
    world: Callable[[World], World] = lambda world: world


def _not_lazy(world: World) -> World:
    """When an engine evicts what of its own blocks, only it knows."""
    return attrs.evolve(world, store_policy="eager") if world.store_policy.startswith("lazy") else world


LEDGERS: Mapping[str, _Kind] = {
    "ledger": _Kind(LedgerMachine, LedgerStories),
    "engine": _Kind(EngineMachine, EngineDraw, _not_lazy),
}


def call(name: str, /, **args: Any) -> Call:
    """A call of a program, as printed ones are written."""
    return Call(name, args)


@attrs.frozen
class Broken:
    """A program that breaks a law."""

    line: str
    """Replays it."""
    violation: str
    program: Program
    num_calls: int
    """Up to the violation."""

    def shortest(self, at_most: int = 2000) -> Program:
        return shorten(self.program, lambda program: run_program(program).violation, at_most)


@attrs.define
class ProgramTally:
    """What was explored."""

    num_programs: int = 0
    num_calls: int = 0
    pairs: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Programs in which two features have met; a feature with itself: programs that met it."""
    layouts: set[object] = attrs.field(factory=set)
    broken: list[Broken] = attrs.field(factory=list)
    digest: str = ""

    def add(self, program: Program, line: str, outcome: Outcome) -> None:
        self.num_programs += 1
        self.num_calls += outcome.num_calls
        self.layouts.add(program.world.groups)
        self.pairs.update(itertools.combinations_with_replacement(sorted(outcome.features), 2))
        self.digest = hashlib.sha256(f"{self.digest} {outcome.digest}".encode()).hexdigest()
        if outcome.violation is not None:
            self.broken.append(Broken(line, str(outcome.violation), program, outcome.num_calls))


def explore_programs(
    face: Face,
    first_seed: int,
    num_programs: int,
    num_calls: int = NUM_CALLS,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> ProgramTally:
    """`num_programs` programs of about `num_calls` calls, from `first_seed` on; fewer once `stop` says so."""
    check_int("first_seed", first_seed, 0)
    check_int("num_programs", num_programs, 0)
    check_callable("stop", stop)
    tally = ProgramTally()
    for seed in range(first_seed, first_seed + num_programs):
        if stop():
            break
        program, outcome = program_of(face, seed, num_calls)
        tally.add(program, f"{face} seed={seed} calls={num_calls}", outcome)
    return tally


def program_of(face: Face, seed: int, num_calls: int = NUM_CALLS) -> tuple[Program, Outcome]:
    """The program that a seed stands for, and how it ends."""
    check_int("seed", seed, 0)
    check_int("num_calls", num_calls, 2)
    if check_face(face) not in LEDGERS:
        from .runtime_face import draw_and_run

        return draw_and_run(face, seed, num_calls)
    program, outcome, refused = _draw_ledger_program(face, seed, num_calls)
    if seed % LOOKS_AT_REFUSALS == 0 and refused and outcome.violation is None:
        outcome = _run_on_ledger(program, refused, WHOLE_EVERY)[0]
    return program, outcome


def replay_program(line: str) -> tuple[Program, Outcome]:
    """The program that a printed line stands for: "ledger seed=17 calls=60"."""
    found = LINE.fullmatch(line.strip()) if isinstance(line, str) else None
    if found is None:
        raise InvalidArgument("line", f'must be as "ledger seed=17 calls=60", got {shown(line)}')
    return program_of(check_face(found["face"]), int(found["seed"]), int(found["calls"] or NUM_CALLS))


def run_program(program: Program) -> Outcome:
    """Make the calls of a program, under every law; on a ledger twice, to look at what was refused."""
    check_type("program", program, Program).check()
    if program.face not in LEDGERS:
        from .runtime_face import run_runtime_program

        return run_runtime_program(program)
    outcome, refused = _run_on_ledger(program)
    if outcome.violation is None and refused:
        outcome, _ = _run_on_ledger(program, refused)
    return outcome


def check_program(program: Program) -> None:
    """Raise the `Violation` of a program that breaks a law."""
    violation = run_program(program).violation
    if violation is not None:
        raise violation


# -- the ledger -----------------------------------------------------------------------------------------------------


def _draw_ledger_program(face: Face, seed: int, num_calls: int) -> tuple[Program, Outcome, frozenset[int]]:
    kind = LEDGERS[face]
    rng = random.Random(f"program {seed}" if face == "ledger" else f"program {face} {seed}")
    world = kind.world(draw_world(rng))
    machine = kind.machine(world, watches=seed % LOOKS_AT_REFUSALS == 1, whole_every=WHOLE_EVERY)
    draw, calls = kind.draw(rng, machine), list[Call]()
    violation: Violation | None = None
    try:
        for _ in range(rng.randint(num_calls // 2, num_calls * 3 // 2)):
            calls.append(draw.next())
            machine.apply(calls[-1])
        machine.finish()
    except Violation as broken:
        violation = broken
    return Program(face, world, tuple(calls), seed), _outcome(machine, violation), frozenset(machine.refused)


def _run_on_ledger(
    program: Program, refused: frozenset[int] = frozenset(), whole_every: int = 1
) -> tuple[Outcome, frozenset[int]]:
    kind = LEDGERS[program.face]
    machine = kind.machine(program.world, refused_before=refused, watches=not refused, whole_every=whole_every)
    violation: Violation | None = None
    try:
        for one in program.calls:
            machine.apply(one)
        machine.finish()
    except Violation as broken:
        violation = broken
    return _outcome(machine, violation), frozenset(machine.refused)


def _outcome(machine: Machine, violation: Violation | None) -> Outcome:
    features = machine.features | {shape.kind for shape in machine.world.groups}
    features.add(machine.world.store_policy.partition(":")[0])
    if len(machine.world.groups) > 1:
        features.add("groups")
    if not machine.world.num_host_blocks:
        features.add("no host")
    return Outcome(violation, machine.num_calls, frozenset(features), machine.digest())

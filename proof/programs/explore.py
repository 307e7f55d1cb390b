"""Exploration of programs: drawn from seeds, with the features that they meet and the laws that they break; replayed
from one line, and shortened."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, get_args

import attrs

from aoffload._common.arguments import check_callable, check_int, check_type, shown
from aoffload.errors import InvalidArgument
from aoffload.testing.violations import Violation

from .engine_draw import EngineDraw
from .engine_machine import EngineMachine
from .extensions import ExtendedEngineMachine, ExtendedMachine, KernelDraw, KernelMachine
from .ledger_machine import LedgerMachine
from .ledger_sequences import LedgerSequences
from .machine import Machine
from .program import (
    Call,
    Face,
    Outcome,
    Program,
    World,
    check_face,
    draw_world,
    with_a_bound,
    with_a_disk,
    with_a_store,
    with_learning,
    with_quotas,
    with_states,
    without_laziness,
)
from .shrinking import shorten

__all__ = [
    "Broken",
    "ProgramTally",
    "call",
    "check_program",
    "explore_programs",
    "program_of",
    "replay_program",
    "run_program",
    "steps_of",
]

NUM_CALLS = 60
LINE = re.compile(r"(?P<face>[a-z-]+) seed=(?P<seed>[0-9]+)(?: calls=(?P<calls>[1-9][0-9]*))?")
WHOLE_EVERY = 4
"""The whole ledger is checked once in so many calls of a drawn program. A program that is run again, to be shortened or
as a test, is checked after each call, so that no call is kept only to get to the next check."""
LOOKS_AT_REFUSALS = 8
"""One in so many programs is run again, to check that refused calls have changed nothing."""


@attrs.frozen
class _Kind:
    """How programs over one kind of ledger are drawn and run."""

    machine: Callable[..., Machine]
    draw: Callable[[random.Random, Any], Any]
    world: Callable[[World], World] = lambda world: world


def _of_an_engine(world: World) -> World:
    return with_a_bound(with_learning(with_a_store(with_a_disk(without_laziness(world)))))


def _of_a_ledger(world: World) -> World:
    return with_learning(with_a_store(with_a_disk(world)))


LEDGERS: Mapping[str, _Kind] = {
    "ledger": _Kind(LedgerMachine, LedgerSequences, lambda world: with_quotas(_of_a_ledger(world))),
    "states": _Kind(LedgerMachine, LedgerSequences, lambda world: with_quotas(_of_a_ledger(with_states(world)))),
    "kernel": _Kind(KernelMachine, KernelDraw, lambda world: attrs.evolve(world, store_policy="eager")),
    "meddled": _Kind(ExtendedMachine, LedgerSequences, _of_a_ledger),
    "engine": _Kind(EngineMachine, EngineDraw, lambda world: with_quotas(_of_an_engine(world))),
    "engine-states": _Kind(EngineMachine, EngineDraw, lambda world: with_quotas(_of_an_engine(with_states(world)))),
    "meddled-engine": _Kind(ExtendedEngineMachine, EngineDraw, _of_an_engine),
}


def call(name: str, /, **args: Any) -> Call:
    """A call of a program, in the notation of printed programs."""
    return Call(name, args)


@attrs.frozen
class Broken:
    """A program that breaks a law."""

    line: str
    """Replays the program."""
    violation: str
    program: Program
    num_calls: int
    """Calls made up to the violation."""

    def shortest(self, at_most: int = 2000) -> Program:
        return shorten(self.program, lambda program: run_program(program).violation, at_most)


@attrs.define
class ProgramTally:
    """Totals of an exploration."""

    num_programs: int = 0
    num_calls: int = 0
    pairs: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """How many programs have met both features of a pair; a feature paired with itself: how many have met it."""
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
    """Run `num_programs` programs of about `num_calls` calls, drawn from `first_seed` on; fewer once `stop` says so."""
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
    """The program that a seed stands for, and its outcome."""
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
    if (face := found["face"]) not in get_args(Face):
        raise InvalidArgument("line", f"must name one of the faces {', '.join(get_args(Face))}, got {shown(line)}")
    return program_of(check_face(face), int(found["seed"]), int(found["calls"] or NUM_CALLS))


def run_program(program: Program) -> Outcome:
    """Make the calls of a program, and check every law. A ledger program with refused calls runs twice, to check that
    they change nothing."""
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


def steps_of(face: Face, seed: int, num_calls: int = NUM_CALLS) -> list[str]:
    """What the program that a seed stands for shows: each call with what it said and a digest of all that ledger and
    plans are after it, then its outcome. Equal in every process and with every build of the core."""
    taken: list[str] = []
    if face in LEDGERS:
        outcome = _draw_ledger_program(face, seed, num_calls, taken)[1]
    else:
        from .runtime_face import draw_and_run

        outcome = draw_and_run(face, seed, num_calls, taken)[1]
    return [*taken, f"{outcome.num_calls} calls, {outcome.violation}, {outcome.digest}"]


def _draw_ledger_program(
    face: Face, seed: int, num_calls: int, taken: list[str] | None = None
) -> tuple[Program, Outcome, frozenset[int]]:
    kind = LEDGERS[face]
    rng = random.Random(f"program {seed}" if face == "ledger" else f"program {face} {seed}")
    world = kind.world(draw_world(rng))
    machine = kind.machine(world, watches=seed % LOOKS_AT_REFUSALS == 1, whole_every=WHOLE_EVERY)
    machine.taken = taken
    draw, calls = kind.draw(rng, machine), list[Call]()
    if world.cell_units:  # one more tier to go to and to come back from
        num_calls *= 2
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
    if machine.world.eviction != "lru":
        features.add("learned")
    if len(machine.world.groups) > 1:
        features.add("groups")
    if not machine.world.num_host_blocks:
        features.add("no host")
    if machine.world.num_disk_blocks:
        features.add("disk")
    if machine.world.cell_units:
        features.add("remote")
    if machine.world.quotas:
        features.add("quotas")
    return Outcome(violation, machine.num_calls, frozenset(features), machine.digest())

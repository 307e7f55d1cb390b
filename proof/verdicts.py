"""Judges every planted defect, and the package without a defect (the twin) by everything that judged a mutant.

A mutant is shown to a thousand simulated runs of scenarios (`battery.py`) or, where no scenario can meet it, to random
programs (`program_runs.py`). Where it names a test, it is shown to that alone. Only a violation or a failed test is a
catch; a child that died or ran out of time is none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import attrs

from .mutants import MUTANTS
from .planting import PRELOADED, ChildResult, Ending, Mutant, in_child, preload
from .program_runs import ENGINE_FACES, ENGINE_RUNTIME_FACES, FACES, RUNTIME_FACES, Face
from .workers import share_out

__all__ = ["TWIN", "Budget", "chosen", "judge"]

TWIN = "(none)"
TEST_RUN = ("pytest", "pytest_asyncio", "hypothesis", "uvloop")
MOST_RUNS = 1000
TWIN_PROGRAMS = 500
"""Programs of one face that the twin runs in one child."""
SEED_RANGE = 1_000_000
"""Number of seeds in a range. Other ranges have other programs."""
TIMEOUT_S = {"test": 300.0, "scenarios": 900.0, "programs": 3600.0}
"""Time limit of a child by its judge, for a defect that makes it run without end: no other takes a tenth of it."""
Row = dict[str, Any]


@attrs.frozen
class Budget:
    """How many programs a mutant is shown to at most."""

    programs: int = 20_000
    """For a mutant that only programs meet."""
    num_ranges: int = 1
    """Ranges of seeds. In more than half of them, programs have to meet it."""


@attrs.frozen
class Case:
    """One child: what is planted, and what it is shown to."""

    mutant: Mutant | None
    judge: str
    """"scenarios", "programs" or "test"."""
    most: int = 0
    """Runs, or programs."""
    scenarios: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    faces: tuple[str, ...] = ()
    first_seed: int = 0

    def judged(self) -> Row:
        began_s = time.monotonic()
        row = _row(self, self._run())
        seconds = time.monotonic() - began_s
        print(f"{seconds:5.1f} s  {row['mutant']}: {_about(row)}", flush=True)
        return row

    def _run(self) -> ChildResult:
        limit_s = TIMEOUT_S[self.judge]
        if self.judge == "test":
            return in_child("proof.mutation:named_tests", list(self.tests), self.mutant, limit_s)
        if self.judge == "programs":
            argument = {"faces": self.faces, "first_seed": self.first_seed, "programs": self.most}
            return in_child("proof.program_runs:detect", argument, self.mutant, limit_s)
        argument = {"scenarios": self.scenarios, "runs": self.most}
        return in_child("proof.battery:detect", argument, self.mutant, limit_s)


def _row(case: Case, found: ChildResult) -> Row:
    mutant, value = case.mutant, found.value if found.ending is Ending.RETURNED else {}
    row = {"mutant": TWIN, "module": "", "promise": ""}
    if mutant is not None:
        row = {"mutant": mutant.name, "module": mutant.module, "promise": mutant.promise}
    violation = value.get("violation")
    oracle = value.get("oracle", "test") if violation else None
    if found.ending is not Ending.RETURNED and mutant is None:
        oracle = found.ending.value  # the twin has to end with a result
    return row | {
        "judge": case.judge,
        "scenarios": case.scenarios,
        "faces": case.faces,
        "first_seed": case.first_seed,
        "test": " ".join(case.tests),
        "oracle": oracle,
        "runs": value.get("runs") if case.judge != "test" else None,
        "calls": value.get("calls"),
        "shortest": value.get("shortest"),
        "detail": str(violation or found.detail)[:300],
        "plan": value.get("plan"),
    }


def _about(row: Row) -> str:
    where = {"scenarios": " ".join(row["scenarios"]) or "all scenarios", "test": row["test"]}
    after = f"{row['runs'] or ''} {row['judge']} {where.get(row['judge'], '')}".strip()
    shown = f", {row['calls']} calls, shortened to {row['shortest']}" if row["shortest"] else ""
    return f"{row['oracle']} after {after[:80]}{shown}  {row['detail'][:80]}"


def chosen(ninth: int | None, only: str = "") -> list[Mutant]:
    """All mutants, or every ninth, that have `only` in their name."""
    found = MUTANTS if ninth is None else MUTANTS[ninth::9]
    return [mutant for mutant in found if only in mutant.name]


def judge(num_workers: int, mutants: Sequence[Mutant], budget: Budget) -> list[Row]:
    """Judge `mutants` and the twin: a row for everything that each of them was shown to."""
    preload((*PRELOADED, *TEST_RUN))
    rows = _judge([case for mutant in mutants for case in _cases(mutant, budget)], num_workers)
    return rows + _judge(list(_twins(rows)), num_workers)


def _judge(cases: Sequence[Case], num_workers: int) -> list[Row]:
    longest_first = sorted(cases, key=lambda case: -case.most)
    return share_out(lambda number: longest_first[number].judged(), len(cases), num_workers)


def _cases(mutant: Mutant, budget: Budget) -> list[Case]:
    if mutant.test:
        return [Case(mutant, "test", tests=(mutant.test,))]
    if mutant.programs:
        faces = _faces_for(mutant.module)
        seeds = range(0, budget.num_ranges * SEED_RANGE, SEED_RANGE)
        return [Case(mutant, "programs", budget.programs, faces=faces, first_seed=seed) for seed in seeds]
    return [Case(mutant, "scenarios", MOST_RUNS, scenarios=mutant.scenarios)]


def _faces_for(module: str) -> tuple[Face, ...]:
    """The faces whose programs can meet a defect in `module`. No program has another engine in it."""
    if module.startswith("aoffload._vllm."):
        return ()
    if module.startswith("aoffload._host_cache."):
        return ENGINE_FACES
    rooms = (
        "_kernel.", "_extensions.", "_eviction.", "_tiers.remote.", "_tiers.fetch.rules", "_tiers.disk.blocks",
        "_tiers.disk.extension", "_tiers.disk.rules", "_tiers.lower.extension", "_tiers.lower.rules",
    )  # fmt: skip
    is_of_ledger = module.removeprefix("aoffload.").startswith(rooms)
    return FACES if is_of_ledger else (*RUNTIME_FACES, *ENGINE_RUNTIME_FACES)


def _twins(rows: Sequence[Row]) -> Iterator[Case]:
    """The cases of the twin: the same runs, programs and tests that mutants were judged by."""
    tests = tuple(sorted({row["test"] for row in rows if row["test"]}))
    if tests:
        yield Case(None, "test", tests=tests)
    runs: dict[tuple[str, ...], int] = {}
    programs: dict[tuple[str, int], int] = {}
    for row in rows:
        if row["judge"] == "scenarios":
            scenarios = tuple(row["scenarios"])
            runs[scenarios] = max(runs.get(scenarios, 0), row["runs"] or 0)
        elif row["judge"] == "programs":
            for face, number in Counter(islice(cycle(row["faces"]), row["runs"] or 0)).items():
                programs[face, row["first_seed"]] = max(programs.get((face, row["first_seed"]), 0), number)
    yield from (Case(None, "scenarios", most, scenarios) for scenarios, most in runs.items() if most)
    for (face, first_seed), most in programs.items():
        for start in range(0, most, TWIN_PROGRAMS):
            number = min(TWIN_PROGRAMS, most - start)
            yield Case(None, "programs", number, faces=(face,), first_seed=first_seed + start)

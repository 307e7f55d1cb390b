"""Every planted defect judged, and the program without one by whatever judged them.

A mutant is shown to a thousand simulated runs (`battery.py`) or, where it names one, to a single test. Only what comes
back in words is a catch: a violation, or a test that failed. A child that died or ran out of time is none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from .mutants import MUTANTS
from .planting import PRELOADED, ChildResult, Ending, Mutant, in_child, preload
from .workers import share_out

__all__ = ["TWIN", "judge"]

TWIN = "(none)"
TEST_RUN = ("pytest", "pytest_asyncio", "hypothesis", "uvloop")
MOST_RUNS = 1000
TIMEOUT_S = 300.0
"""Nothing takes a tenth of it: for a child that waits for what never comes."""
Row = dict[str, Any]


@attrs.frozen
class Case:
    """One child: what is planted, and what it is shown to."""

    mutant: Mutant | None
    runs: int = 0
    scenarios: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    def judged(self) -> Row:
        began_s = time.monotonic()
        row = _row(self, self._run())
        seconds = time.monotonic() - began_s
        where = " ".join(self.scenarios or self.tests[:1]) or "all scenarios"
        about = f"{row['oracle']} after {row['runs']} runs of {where}  {row['detail'][:80]}"
        print(f"{seconds:5.1f} s  {row['mutant']}: {about}", flush=True)
        return row

    def _run(self) -> ChildResult:
        if self.tests:
            return in_child("proof.mutation:named_tests", list(self.tests), self.mutant, TIMEOUT_S)
        argument = {"scenarios": self.scenarios, "runs": self.runs}
        return in_child("proof.battery:detect", argument, self.mutant, TIMEOUT_S)


def _row(case: Case, found: ChildResult) -> Row:
    mutant, value = case.mutant, found.value if found.ending is Ending.RETURNED else {}
    row = {"mutant": TWIN, "module": "", "promise": ""}
    if mutant is not None:
        row = {"mutant": mutant.name, "module": mutant.module, "promise": mutant.promise}
    violation = value.get("violation")
    oracle = value.get("oracle", "test") if violation else None
    if found.ending is not Ending.RETURNED and mutant is None:
        oracle = found.ending.value  # the twin has to come through
    return row | {
        "scenarios": case.scenarios,
        "test": " ".join(case.tests),
        "oracle": oracle,
        "runs": None if case.tests else value.get("runs"),
        "detail": str(violation or found.detail)[:300],
        "plan": value.get("plan"),
    }


def judge(num_workers: int) -> list[Row]:
    """A row for each mutant, and one for each of what the twin was shown to."""
    preload((*PRELOADED, *TEST_RUN))
    cases = [Case(one, MOST_RUNS, one.scenarios, (one.test,) if one.test else ()) for one in MUTANTS]
    rows = _judge(cases, num_workers)
    return rows + _judge(list(_twins(rows)), num_workers)


def _judge(cases: Sequence[Case], num_workers: int) -> list[Row]:
    return share_out(lambda number: cases[number].judged(), len(cases), num_workers)


def _twins(rows: Iterable[Row]) -> list[Case]:
    """The same runs that mutants were judged by, the longest first, and the same tests."""
    most: dict[tuple[str, ...], int] = {}
    for row in rows:
        scenarios = tuple(row["scenarios"])
        most[scenarios] = max(most.get(scenarios, 0), row["runs"] or 0)
    cases = [Case(None, runs, scenarios) for scenarios, runs in most.items() if runs]
    tests = tuple(sorted({row["test"] for row in rows if row["test"]}))
    return [*([Case(None, tests=tests)] if tests else []), *sorted(cases, key=lambda case: -case.runs)]

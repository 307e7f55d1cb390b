"""Mutation testing: which defects, planted one at a time, the battery notices, and which survive.

`python -m proof.mutation --results FILE [--sample N --seed S] [--workers N] [--front module:function] [--planted]`

Cosmic Ray's operators say what to change. Its runner is not used: it writes each mutant over the source and starts a
test command for it; planting a mutant in a forked child costs milliseconds. The stages of the battery go from cheap to
thorough, and end at the first one that objects. A run can be interrupted: results are lines of JSON, and a mutant with
a result in the file is not run again.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import attrs

from .mutants import MUTANTS
from .planting import JSON, PRELOADED, ChildResult, Ending, Mutant, in_child, preload, source_path
from .workers import share_out

__all__ = ["BATTERY", "core_tests", "main", "named_tests", "oracle", "shell_tests", "walks"]

ROOT = Path(__file__).resolve().parent.parent
BATTERY = ("proof.mutation:walks", "proof.mutation:oracle", "proof.mutation:core_tests", "proof.mutation:shell_tests")
"""Functions of one argument (None here) that return {"violation": str | None, "runs": int}, cheap ones first."""
TEST_RUN = ("pytest", "pytest_asyncio", "hypothesis", "uvloop")
FIRST_TIMEOUT_S = 300.0
LEFT_OUT = ("test_oracle.py", "test_random_walks.py", "test_soak.py", "test_*_machine*.py")
"""Tests that the first stages replace, and slow tests."""


# -- the battery ------------------------------------------------------------------------------------------------------


def walks(_: JSON) -> JSON:
    """Random walks over every call of the ledger, with tagged bytes. A failure raises."""
    sys.path.insert(0, str(ROOT / "tests" / "core"))
    from random_walk import Walk  # type: ignore[import-not-found]

    for seed in range(200):
        Walk(seed).run(150)
    return {"violation": None, "runs": 200}


def oracle(_: JSON) -> JSON:
    """The ledger compared with the naive model, two scenarios of each shape. A failure raises."""
    sys.path.insert(0, str(ROOT / "tests" / "core"))
    from test_oracle import SHAPES, explore  # type: ignore[import-not-found]

    for seed in range(2):
        for shape in SHAPES:
            explore(shape, 1000 + seed, 120)
    return {"violation": None, "runs": 2 * len(SHAPES)}


def core_tests(_: JSON) -> JSON:
    return _run_pytest(_files("tests/core"))


def shell_tests(_: JSON) -> JSON:
    return _run_pytest(_files("tests/shell"))


def named_tests(names: JSON) -> JSON:
    """Run only these tests, each a file and a function as pytest names it."""
    return _run_pytest(names)


class _Failures:
    """A pytest plugin: which tests ran, and which did not pass."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: object) -> None:
        self._take(report)
        self.num_passed += getattr(report, "when", "") == "call" and bool(getattr(report, "passed", False))

    def pytest_collectreport(self, report: object) -> None:
        self._take(report)

    def _take(self, report: object) -> None:
        if getattr(report, "failed", False):
            self.failed.append(str(getattr(report, "nodeid", report)))


def _files(folder: str) -> list[str]:
    files = (ROOT / folder).glob("test_*.py")
    return sorted(str(path) for path in files if not any(map(path.match, LEFT_OUT)))


def _run_pytest(names: Sequence[str]) -> JSON:
    import pytest

    os.chdir(ROOT)
    found = _Failures()
    options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain"]  # the plugins are imported: too late to rewrite
    status = pytest.main([*options, *names], plugins=[found])
    violation = None if status == 0 else found.failed[0] if found.failed else f"pytest ended with {status!r}"
    return {"violation": violation, "runs": found.num_passed}


# -- one mutant -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Stage:
    function: str
    timeout_s: float


@attrs.frozen
class Candidate:
    """A mutant that is made when its turn comes."""

    key: str
    module: str
    line: int
    operator: str
    make: Callable[[], Mutant | None]
    """Makes the mutant. None: it is no valid Python, or the same program."""


@attrs.frozen
class Result:
    """What became of one mutant."""

    key: str
    place: str
    operator: str
    outcome: str
    """killed, survived or invalid"""
    stage: str = ""
    """The stage that objected; how that ended, and with what, is in `ending` and `detail`."""
    ending: str = ""
    detail: str = ""
    duration_s: float = 0.0
    diff: list[str] = attrs.field(factory=list)


def _objection(result: ChildResult) -> str:
    """What a stage objects to; empty if nothing."""
    if result.ending is Ending.RETURNED:
        return str(result.value["violation"] or "")
    return result.detail or result.ending.value


def _diff_of(mutant: Mutant) -> list[str]:
    """The lines that were taken out and put in."""
    return [
        line
        for patch in mutant.patches
        for line in difflib.unified_diff(patch.old.splitlines(), patch.new.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]


def _judge(candidate: Candidate, battery: Sequence[Stage]) -> Result:
    began_s, mutant = time.monotonic(), candidate.make()
    place = f"{candidate.module.replace('.', '/')}.py:{candidate.line}"
    result = Result(candidate.key, place, candidate.operator, "invalid")
    if mutant is not None:
        result = _verdict(attrs.evolve(result, outcome="survived", diff=_diff_of(mutant)), mutant, battery)
    return attrs.evolve(result, duration_s=round(time.monotonic() - began_s, 2))


def _verdict(result: Result, mutant: Mutant, battery: Sequence[Stage]) -> Result:
    for stage in battery:
        found = in_child(stage.function, None, mutant, stage.timeout_s)
        if objection := _objection(found):
            ending, detail = found.ending.value, objection[:400]
            return attrs.evolve(result, outcome="killed", stage=stage.function, ending=ending, detail=detail)
    return result


def _timed(functions: Sequence[str]) -> list[Stage]:
    """Run the battery on the sound source: it must not object, and its duration sets the time limit of a mutant."""
    stages: list[Stage] = []
    for function in functions:
        result = in_child(function, None, None, FIRST_TIMEOUT_S)
        if objection := _objection(result):
            raise SystemExit(f"{function} objects to the sound source: {objection}\n{result.output}")
        print(f"{function}: {result.value['runs']} runs in {result.duration_s:.1f} s", flush=True)
        stages.append(Stage(function, 10.0 + 5 * result.duration_s))
    return stages


# -- all of them ------------------------------------------------------------------------------------------------------


def _automatic() -> list[Candidate]:
    from .mutants_automatic import enumerate_specs, mutant_of  # needs Cosmic Ray, which nothing else here does

    core = source_path("aoffload._kernel").parent
    modules = [f"aoffload._kernel.{path.stem}" for path in sorted(core.glob("[!_]*.py"))]
    modules += ["aoffload._extensions.invalidation", "aoffload._runtime.request"]
    return [
        Candidate(spec.key, spec.module, spec.line, spec.operator, partial(mutant_of, spec))
        for spec in enumerate_specs(modules)
    ]


def _planted() -> list[Candidate]:
    return [Candidate(m.name, m.module, _line_of(m), "planted", partial(lambda m: m, m)) for m in MUTANTS]


def _line_of(mutant: Mutant) -> int:
    return source_path(mutant.module).read_text().partition(mutant.old)[0].count("\n") + 1


def _known(path: Path) -> list[Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def _chosen(options: argparse.Namespace) -> list[Candidate]:
    """The candidates in random order, so that those done so far are a fair sample."""
    candidates = _planted() if options.planted else _automatic()
    random.Random(options.seed).shuffle(candidates)
    return candidates[: options.sample]


def _work(candidates: Sequence[Candidate], battery: Sequence[Stage], path: Path, number: int) -> None:
    line = json.dumps(attrs.asdict(_judge(candidates[number], battery)))
    with path.open("a") as results:  # one write each: several workers append
        results.write(line + "\n")


# -- the report -------------------------------------------------------------------------------------------------------


def _report(results: Sequence[Result]) -> Iterator[str]:
    by_file: dict[str, Counter[str]] = {}
    for result in results:
        kind = "timeout" if result.ending == Ending.TIMED_OUT.value else result.outcome
        by_file.setdefault(result.place.partition(":")[0], Counter())[kind] += 1
    yield f"{'':34}  killed  survived  timeout  invalid"
    for file, counts in [*sorted(by_file.items()), ("all", sum(by_file.values(), Counter()))]:
        found = [counts[kind] for kind in ("killed", "survived", "timeout", "invalid")]
        yield "{:34}{:>8}{:>10}{:>9}{:>9}".format(file, *found)
    for stage, count in Counter(result.stage for result in results if result.stage).most_common():
        yield f"{count:>6} noticed by {stage}"
    for result in sorted(results, key=lambda result: result.place):
        if result.outcome == "survived":
            name = result.key if result.operator == "planted" else result.operator
            yield "\n".join([f"{result.place} {name}", *(f"    {line}" for line in result.diff)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant defects one at a time; count how many the battery notices.")
    parser.add_argument("--results", type=Path, required=True, help="lines of JSON; what is in there is not run again")
    parser.add_argument("--sample", type=int, help="how many mutants to take, at random (all of them)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--front", action="append", default=[], help="module:function to put before the battery")
    parser.add_argument("--planted", action="store_true", help="the mutants planted by hand instead")
    parser.add_argument("--report", action="store_true", help="run nothing, only report")
    return parser.parse_args()


def main() -> None:
    options = _options()
    done = {result.key for result in _known(options.results)}
    candidates = _chosen(options)
    if not options.report:
        preload((*PRELOADED, *TEST_RUN))
        battery = _timed([*options.front, *BATTERY])
        todo = [candidate for candidate in candidates if candidate.key not in done]
        print(f"{len(candidates)} mutants, {len(todo)} to do", flush=True)
        share_out(partial(_work, todo, battery, options.results), len(todo), options.workers)
    keys = {candidate.key for candidate in candidates}
    print(*_report([result for result in _known(options.results) if result.key in keys]), sep="\n")


if __name__ == "__main__":
    main()

"""`python -m proof`: run programs, explore schedules, replay and soak; `python -m proof mutants`: plant defects;
`python -m proof states`: run programs whose model has a recurrent state.

`--short` is what every change has to pass: a quarter of the programs and half of the campaign, both chosen by the
commit, and fewer traces and a shorter soak, which are the same for every commit. The results are printed and kept in
build/proof/. Without `--seconds` everything ends by count, on any machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .mutants import MUTANTS
from .report import Report
from .shares import add_share, share_of

PROCESSES = 2
MUTANT_WORKERS = 3
"""One more than there are cores, because some defects only make their test wait for a minute."""
OUT = Path("build/proof")
PARTS = ("programs", "campaign", "traces", "soak")
"""The parts that run by default. The mutants and the programs with states are runs of their own."""
OWN_RUNS = ("mutants", "states")
NUM_PROGRAMS, NUM_STATE_PROGRAMS = 20_000, 22_000
NUM_TRACES, NUM_RESTS = 5, 12
SHORT_TRACES, SHORT_RESTS = 2, 8
"""How many processes are compared, and how many rests a soak has: first in full, then with `--short`. Two processes are
enough for both hash seeds. After eight rests, enough requests have run to judge the memory."""


def launch(name: str, *words: str, hash_seed: str = "random") -> tuple[Path, subprocess.Popen[bytes]]:
    """Start a process that writes `build/proof/NAME.json`."""
    path = OUT / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", *words, "--json", str(path)]
    log = (OUT / f"{name}.log").open("wb")
    return path, subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONHASHSEED": hash_seed})


def gather(launched: Iterable[tuple[Path, subprocess.Popen[bytes]]]) -> list[Any]:
    """Wait for all processes, and return what each wrote. `SystemExit`, with the log's name, if one wrote nothing."""
    found: list[Any] = []
    for path, process in list(launched):
        status = process.wait()
        if not path.exists():
            raise SystemExit(
                f"{path.stem} ended with status {status} and wrote nothing: see {path.with_suffix('.log')}"
            )
        found.append(json.loads(path.read_text()))
    return found


def part(name: str, *words: str, num_workers: int = PROCESSES) -> Any:
    """Run one part in workers of its own, and return what it wrote."""
    (found,) = gather([launch(name, "proof.shard", name, "--of", str(num_workers), *words)])
    return found


def traces(number: int) -> list[dict[str, str]]:
    """Traces of `number` processes, with two hash seeds."""
    found: list[dict[str, str]] = []
    for first in range(0, number, PROCESSES):
        numbers = range(first, min(number, first + PROCESSES))
        found += gather([launch(f"traces{i}", "proof.shard", "traces", hash_seed=str(i % 2)) for i in numbers])
    return found


def soaks(num_rests: int, seconds: float) -> list[dict[str, Any]]:
    """Run a soak on each backend, side by side."""
    backends = ("asyncio", "trio")
    words = ("--rests", str(num_rests), "--seconds", str(seconds), "--backend")
    found = gather([launch(f"soak_{backend}", "proof.soak", *words, backend) for backend in backends])
    return [_soak(backend, one) for backend, one in zip(backends, found, strict=True)]


def _soak(backend: str, found: dict[str, Any]) -> dict[str, Any]:
    about = (
        f"{found['wall_s']:.0f} s, {found['num_requests']:,} requests, {found['blocks_checked']:,} blocks checked, "
        f"{found['max_pinned_at_rest']} pinned at rest, {found['slope_mb_per_1000']:+.2f} MB a thousand "
        f"{found['problems'] or ''}"
    )
    return {"backend": backend, "passed": found["has_passed"], "about": about}


def _share(option: str, given: str, num_shares: int, what: str) -> list[str]:
    """The arguments that pass its share to a part; empty for the whole part."""
    share = share_of(given, num_shares, what)
    return [] if share is None else [option, str(share)]


def _run(given: argparse.Namespace) -> Report:
    report = Report(is_short=given.short)
    num_programs = NUM_PROGRAMS if given.programs is None else given.programs
    if "programs" in given.parts:
        words = _share("--quarter", given.quarter, 4, "programs")
        report.programs = part("programs", "--programs", str(num_programs), "--seconds", str(given.seconds), *words)
    if "states" in given.parts:
        number = str(NUM_STATE_PROGRAMS if given.programs is None else given.programs)
        report.states = part("states", "--programs", number, "--seconds", str(given.seconds))
    if "campaign" in given.parts:
        words = _share("--half", given.half, 2, "campaign")
        report.campaign = part("campaign", "--depth", str(given.depth), *words)
    if "mutants" in given.parts:
        words = _share("--ninth", given.ninth, 9, "mutants")
        budget = ("--programs", str(num_programs), "--ranges", str(given.ranges))
        report.mutants = part("mutants", *words, *budget, "--only", given.only, num_workers=MUTANT_WORKERS)
    if "traces" in given.parts:
        report.traces = traces(SHORT_TRACES if given.short else NUM_TRACES)
    if "soak" in given.parts:
        report.soaks = soaks(given.rests or (SHORT_RESTS if given.short else NUM_RESTS), given.soak_seconds)
    return report


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parts = f"{', '.join(PARTS)} (these four, if none is named), {', '.join(OWN_RUNS)}"
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts)
    about = (
        f"the number of programs (default: {NUM_PROGRAMS:,}; for states {NUM_STATE_PROGRAMS:,}); the limit for a mutant"
    )
    parser.add_argument("--programs", type=int, help=about)
    parser.add_argument("--short", action="store_true", help="run the part that each change must pass")
    add_share(parser, "quarter", 4, "the programs of the short form")
    add_share(parser, "half", 2, "the campaign of the short form")
    parser.add_argument("--seconds", type=float, default=0.0, help="continue with new seeds until this time has passed")
    parser.add_argument("--depth", type=int, default=1, help="how far the campaign explores each scenario")
    parser.add_argument(
        "--rests",
        type=int,
        help=f"the number of rests of the soaks (default: {NUM_RESTS}), each after some 400 requests",
    )
    parser.add_argument(
        "--soak-seconds", type=float, default=0.0, help="end the soaks after this time, and not after --rests"
    )
    mutants = parser.add_argument_group("mutants")
    add_share(mutants, "ninth", 9, "the mutants")
    mutants.add_argument("--only", default="", metavar="TEXT", help="plant only mutants with TEXT in their name")
    mutants.add_argument(
        "--ranges", type=int, default=1, help="the number of seed ranges; programs must find the mutant in each range"
    )
    given = parser.parse_args()
    if unknown := set(given.parts) - {*PARTS, *OWN_RUNS}:
        parser.error(f"there is no part called {', '.join(unknown)}")
    given.parts = given.parts or list(PARTS)
    if given.short:
        given.quarter, given.half = given.quarter or "auto", given.half or "auto"
    elif given.quarter or given.half:
        parser.error("--quarter and --half are of the short form")
    counts = (given.programs, given.ranges, given.depth, given.rests)
    if any(count is not None and count < 1 for count in counts):
        parser.error("--programs, --ranges, --depth and --rests count from 1")
    if not any(given.only in mutant.name for mutant in MUTANTS):
        parser.error(f"argument --only: no mutant has {given.only!r} in its name")
    return given


def main() -> int:
    given = _given()
    OUT.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    report = _run(given)
    report.seconds = time.monotonic() - began_s
    is_own_run = len(given.parts) == 1 and given.parts[0] in OWN_RUNS
    path = OUT / (f"{given.parts[0]}.md" if is_own_run else "report.md")
    path.write_text(report.markdown())
    print(*report.lines(), f"{report.seconds:.0f} s; the tables are in {path}", sep="\n")
    return 0 if report.is_met else 1


if __name__ == "__main__":
    sys.exit(main())

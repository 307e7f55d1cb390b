"""`python -m proof`: run programs, explore schedules, replay and soak; `python -m proof mutants`: plant defects;
`python -m proof states`: run programs whose model has a recurrent state.

The results are printed and kept in build/proof/. Without `--seconds` everything ends by count, on any machine."""

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

PROCESSES = 2
OUT = Path("build/proof")
PARTS = ("programs", "campaign", "traces", "soak")
"""The parts that run by default. The mutants and the programs with states are runs of their own."""
OWN_RUNS = ("mutants", "states")
NUM_PROGRAMS, NUM_STATE_PROGRAMS = 20_000, 22_000


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


def part(name: str, *words: str) -> Any:
    """Run one part in workers of its own, and return what it wrote."""
    (found,) = gather([launch(name, "proof.shard", name, "--of", str(PROCESSES), *words)])
    return found


def traces() -> list[dict[str, str]]:
    """Traces of five processes, with two hash seeds."""
    found: list[dict[str, str]] = []
    for first in range(0, 5, PROCESSES):
        numbers = range(first, min(5, first + PROCESSES))
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


def ninth_of(given: str) -> int | None:
    """Which ninth of the mutants to run: as given, or by the checked-out commit (`auto`). None: all of them."""
    if given != "auto":
        return int(given) if given else None
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = found.stdout.strip()
    ninth = int(commit, 16) % 9 if commit else 0
    print(f"mutants: ninth {ninth}, by commit {commit or '(none)'}", flush=True)
    return ninth


def _run(given: argparse.Namespace) -> Report:
    report = Report()
    num_programs = NUM_PROGRAMS if given.programs is None else given.programs
    if "programs" in given.parts:
        report.programs = part("programs", "--programs", str(num_programs), "--seconds", str(given.seconds))
    if "states" in given.parts:
        number = str(NUM_STATE_PROGRAMS if given.programs is None else given.programs)
        report.states = part("states", "--programs", number, "--seconds", str(given.seconds))
    if "campaign" in given.parts:
        report.campaign = part("campaign", "--depth", str(given.depth))
    if "mutants" in given.parts:
        ninth = ninth_of(given.ninth)
        words = ["--ninth", str(ninth)] if ninth is not None else []
        budget = ("--programs", str(num_programs), "--ranges", str(given.ranges))
        report.mutants = part("mutants", *words, *budget, "--only", given.only)
    if "traces" in given.parts:
        report.traces = traces()
    if "soak" in given.parts:
        report.soaks = soaks(given.rests, given.soak_seconds)
    return report


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parts = f"{', '.join(PARTS)} (these four, if none is named), {', '.join(OWN_RUNS)}"
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts)
    about = f"how many ({NUM_PROGRAMS:,}; with states {NUM_STATE_PROGRAMS:,}), and what a mutant is shown at most"
    parser.add_argument("--programs", type=int, help=about)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on with programs of new seeds for that long")
    parser.add_argument("--depth", type=int, default=1, help="of the campaign: how far each scenario is explored")
    parser.add_argument("--rests", type=int, default=12, help="of the soaks, each after some 400 requests")
    parser.add_argument("--soak-seconds", type=float, default=0.0, help="let the soaks go on for that long instead")
    mutants = parser.add_argument_group("mutants")
    mutants.add_argument("--ninth", default="", choices=["auto", *map(str, range(9))], help="auto: by the commit")
    mutants.add_argument("--only", default="", metavar="TEXT", help="those with it in their name")
    mutants.add_argument("--ranges", type=int, default=1, help="of seeds: in each of them programs have to find it")
    given = parser.parse_args()
    if unknown := set(given.parts) - {*PARTS, *OWN_RUNS}:
        parser.error(f"there is no part called {', '.join(unknown)}")
    given.parts = given.parts or list(PARTS)
    if (given.programs is not None and given.programs < 1) or given.ranges < 1 or given.depth < 1 or given.rests < 1:
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

"""`python -m proof`: explore, plant, replay and soak; print what was found and keep it in build/proof/."""

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

import attrs

from .report import Report

PROCESSES = 2
OUT = Path("build/proof")
PARTS = ("campaign", "mutants", "traces", "soak")


def launch(name: str, *words: str, hash_seed: str = "random") -> tuple[Path, subprocess.Popen[bytes]]:
    """A process that writes `build/proof/NAME.json`."""
    path = OUT / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", *words, "--json", str(path)]
    log = (OUT / f"{name}.log").open("wb")
    return path, subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONHASHSEED": hash_seed})


def gather(launched: Iterable[tuple[Path, subprocess.Popen[bytes]]]) -> list[Any]:
    """Wait for all of them; what each wrote. A process that failed is an error, and its log says why."""
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
    """What one part wrote, computed by workers of its own."""
    (found,) = gather([launch(name, "proof.shard", name, "--of", str(PROCESSES), *words)])
    return found


def traces() -> list[dict[str, str]]:
    """Five processes, two hash seeds."""
    found: list[dict[str, str]] = []
    for first in range(0, 5, PROCESSES):
        numbers = range(first, min(5, first + PROCESSES))
        found += gather([launch(f"traces{i}", "proof.shard", "traces", hash_seed=str(i % 2)) for i in numbers])
    return found


def soaks(seconds: float) -> list[dict[str, Any]]:
    """One on each backend, side by side."""
    backends = ("asyncio", "trio")
    words = ("--seconds", str(seconds), "--backend")
    found = gather([launch(f"soak_{backend}", "proof.soak", *words, backend) for backend in backends])
    return [_soak(backend, one) for backend, one in zip(backends, found, strict=True)]


def _soak(backend: str, found: dict[str, Any]) -> dict[str, Any]:
    about = (
        f"{found['wall_s']:.0f} s, {found['num_requests']:,} requests, {found['blocks_checked']:,} blocks checked, "
        f"{found['max_pinned_at_rest']} pinned at rest, {found['slope_mb_per_min']:+.2f} MB/min "
        f"{found['problems'] or ''}"
    )
    return {"backend": backend, "passed": found["has_passed"], "about": about}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all, if none is named")
    parser.add_argument("--rounds", type=int, default=4, help="seeds sampled for each scenario and backend")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on exploring new seeds for that long")
    parser.add_argument("--soak-seconds", type=float, default=60.0)
    given = parser.parse_args()
    parts = given.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part called {', '.join(unknown)}")
    OUT.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    report = Report([], [], [], [])
    if "campaign" in parts:
        report.campaign = part("campaign", "--rounds", str(given.rounds), "--seconds", str(given.seconds))
    if "mutants" in parts:
        report.mutants = part("mutants")
    if "traces" in parts:
        report.traces = traces()
    if "soak" in parts:
        report.soaks = soaks(given.soak_seconds)
    report.seconds = time.monotonic() - began_s
    (OUT / "report.md").write_text(report.markdown())
    (OUT / "report.json").write_text(json.dumps([attrs.asdict(line) for line in report.lines()], indent=1))
    print(*report.lines(), f"{report.seconds:.0f} s; the tables are in {OUT / 'report.md'}", sep="\n")
    return 0 if report.is_met else 1


if __name__ == "__main__":
    sys.exit(main())

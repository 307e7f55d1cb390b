"""Run everything that needs a device, each part for its share of nine minutes, and keep the figures in build/gpu.

Exit status: 0 every figure is there and what is wanted; 1 something is missing or missed; 2 no device.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .parts import PARTS, PROBE_S, TOTAL_S, Part
from .readings import Reading
from .report import PartReport, Report
from .running import Clock, Ends, ends_within, run_process

__all__ = ["main", "run_parts"]

OUT = Path("build/gpu")
REPORT = "report.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m proof.gpu", description=(__doc__ or "").partition("\n")[0])
    names = [part.name for part in PARTS]
    parser.add_argument("names", nargs="*", metavar="PART", help=f"{', '.join(names)}; all, if none is named")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(names):
        parser.error(f"there is no part called {', '.join(sorted(unknown))}")
    _end_in_order()
    deadline_s = time.monotonic() + TOTAL_S
    OUT.mkdir(parents=True, exist_ok=True)
    found = look()
    if "problem" in found:
        print(f"gpu: not run, since {found['problem']}", file=sys.stderr)
        return 2
    parts = [part for part in PARTS if part.name in (given.names or names)]
    return run_parts(parts, OUT, deadline_s, about=found["about"], missing=found["missing"])


def _end_in_order() -> None:
    """Set up signals and limits. SIGTERM exits, which also ends the running part. Parts react to SIGINT, which a
    process started in the background would ignore. Aborted processes write no core files."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def look(out: Path = OUT) -> dict[str, Any]:
    """What `proof.gpu.probe` finds. It runs in a process of its own, because torch may hang."""
    file = out / "probe.json"
    file.unlink(missing_ok=True)
    needs = sorted({name for part in PARTS for name in part.needs})
    command = [sys.executable, "-m", "proof.gpu.probe", str(file), *needs]
    ended = run_process(command, PROBE_S, out / "probe.log")
    if ended.problem:
        return {"problem": f"looking for a device failed: {ended.problem}, see {out / 'probe.log'}"}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def run_parts(
    parts: Sequence[Part],
    out: Path,
    deadline_s: float,
    *,
    about: str,
    missing: Collection[str] = (),
    ends: Ends = ends_within,
    clock: Clock = time.monotonic,
) -> int:
    """Run the parts in turn until `deadline_s` of `clock`, and write the report after each. Returns the exit status.

    A part has its own limit, and the time that the parts before it have left over.
    """
    report = Report(about, [PartReport(part) for part in parts])
    report.write(out / REPORT)
    for number, found in enumerate(report.parts):
        reserved_s = sum(part.limit_s for part in parts[number + 1 :])
        _run(found, out, deadline_s - clock() - reserved_s, missing, ends, clock)
        report.write(out / REPORT)
        print(found.line(), flush=True)
    print(f"the figures are in {out / REPORT}")
    return 0 if report.is_good else 1


def _run(found: PartReport, out: Path, limit_s: float, missing: Collection[str], ends: Ends, clock: Clock) -> None:
    part = found.part
    if lacks := [name for name in part.needs if name in missing]:
        found.problem = f"not run: {', '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} missing"
        return
    file = out / f"{part.name}.json"
    file.unlink(missing_ok=True)  # no figure of an earlier run
    command = [sys.executable, *(word.replace("{out}", str(file)) for word in part.words)]
    ended = run_process(command, limit_s, out / f"{part.name}.log", ends, clock)
    found.took_s, found.problem = ended.took_s, ended.problem
    try:
        found.readings = _read(part, file)
    except (ValueError, LookupError, TypeError) as error:
        found.problem = found.problem or f"its output cannot be read: {error!r}"


def _read(part: Part, file: Path) -> Mapping[str, Reading]:
    return part.read(file.read_text()) if file.exists() else {}


if __name__ == "__main__":
    sys.exit(main())

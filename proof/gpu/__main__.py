"""Run the parts that need a GPU, each within its time limit, and keep the figures in build/gpu.

    python -m proof.gpu                             every part
    python -m proof.gpu rules soak                  some parts, in this order
    python -m proof.gpu --phase 1 --out DIR         the first of two phases, if you have a GPU for minutes only
    python -m proof.gpu --seconds 100 --out DIR rules cuda_copy

The report has the figures of earlier runs on the same device, too, because it is made from all files in build/gpu. Exit
status: 0 if every figure of this run was measured and is as wanted; 1 if one is not; 2 if nothing was run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from .environment import CONNECTIONS
from .parts import PARTS, PHASES, PROBE_S, SMALL, Part, limits_of
from .report import PartReport
from .results import REPORT, Results, saving
from .running import GRACE_S, Clock, Ends, ends_within, run_process

__all__ = ["look", "main", "run_parts"]

WORK = Path("build/gpu")
DRY = "A dry run, whose figures mean nothing"
"""Begins the report of one, which so adds nothing to the report of a real run."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parsed(arguments)
    _end_in_order()
    if given.small:
        os.environ[SMALL] = "1"
    found = look(WORK)
    if "problem" in found:
        print(f"gpu: not run, since {found['problem']}", file=sys.stderr)
        return 2
    _warn(found)
    about = f"{DRY}; {found['about']}" if given.small else found["about"]
    kept = Results(WORK, about, found["environment"], given.out)
    deadline_s = time.monotonic() + (limits_of(given.parts) if given.seconds is None else given.seconds)
    ends = saving(kept.keep, ends_within)
    return run_parts(given.parts, kept, deadline_s, missing=found["missing"], ends=ends, is_small=given.small)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; `parts` are the parts to run, and `seconds` may be None."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "python -m proof.gpu", description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {part.name: part for part in PARTS}
    add = parser.add_argument
    add("names", nargs="*", metavar="PART", help=f"{', '.join(known)}; all, if none is named")
    add("--phase", type=int, choices=tuple(PHASES), help="the parts and the time of one of two phases")
    add("--seconds", type=float, metavar="N", help="for all parts together, without the time to look for a device "
        "(default: what the parts may take)")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="keep the report and one archive of everything there, too")
    add("--small", action="store_true", help="a dry run: as little work as possible, and figures that mean nothing")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(known):
        parser.error(f"there is no part called {', '.join(sorted(unknown))}")
    if given.phase is not None and given.names:
        parser.error("argument --phase: not with names of parts")
    if given.phase is not None:
        given.names, seconds = PHASES[given.phase]
        given.seconds = seconds if given.seconds is None else given.seconds
    given.parts = [known[name] for name in given.names or known]
    return given


def _end_in_order() -> None:
    """Set up signals and limits. SIGTERM exits, which also ends the running part. Parts react to SIGINT, which a
    process started in the background would ignore. Aborted processes write no core files."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def look(work: Path) -> dict[str, Any]:
    """What `proof.gpu.probe` finds. It runs in a process of its own, because torch may hang."""
    work.mkdir(parents=True, exist_ok=True)
    file = work / "probe.json"
    file.unlink(missing_ok=True)
    needs = sorted({name for part in PARTS for name in part.needs})
    command = [sys.executable, "-m", "proof.gpu.probe", str(file), *needs]
    ended = run_process(command, PROBE_S, work / "probe.log")
    if ended.problem:
        return {"problem": f"looking for a device failed: {ended.problem}, see {work / 'probe.log'}"}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _warn(found: dict[str, Any]) -> None:
    """Say at once what will be missing in the report, or wrong."""
    for name in found["missing"]:
        parts = [part.name for part in PARTS if name in part.needs]
        print(f"gpu: {name} is missing: {', '.join(parts)} will not run", file=sys.stderr)
    if found["environment"].get(CONNECTIONS) == "1":
        print(f"gpu: {CONNECTIONS} is 1: copies and compute wait for each other in one queue", file=sys.stderr)


def run_parts(
    parts: Sequence[Part],
    kept: Results,
    deadline_s: float,
    *,
    missing: Collection[str] = (),
    ends: Ends = ends_within,
    clock: Clock = time.monotonic,
    is_small: bool = False,
) -> int:
    """Run the parts in turn until `deadline_s` of `clock`, and write the report after each. Returns the exit status.

    A part has its own limit, and the time that the parts before it have left over. Where the time is too short for all,
    the first ones have theirs.
    """
    kept.expect(parts)
    is_good = True
    for number, part in enumerate(parts):
        left_s = deadline_s - clock()
        limit_s = max(min(part.limit_s, left_s), left_s - limits_of(parts[number + 1 :]))
        found = _run(part, kept, limit_s, missing, ends, clock, is_small)
        is_good &= found.is_good
        print(found.line(), flush=True)
    print(f"the figures are in {kept.work / REPORT}")
    return 0 if is_good else 1


def _run(
    part: Part, kept: Results, limit_s: float, missing: Collection[str], ends: Ends, clock: Clock, is_small: bool
) -> PartReport:
    if lacks := [name for name in part.needs if name in missing]:
        return kept.refuse(part, f"not run: {', '.join(lacks)} {'is' if len(lacks) == 1 else 'are'} missing")
    if limit_s <= GRACE_S:
        return kept.refuse(part, "not run: no time was left")
    file = kept.begin(part)
    command = [sys.executable, *(word.replace("{out}", str(file)) for word in part.command(is_small))]
    try:
        ended = run_process(command, limit_s, kept.log(part), ends, clock)
    except BaseException:  # the whole run ends, and what the part has written so far is kept
        kept.end(part, "the run was ended while it ran")
        raise
    return kept.end(part, ended.problem, ended.took_s)


if __name__ == "__main__":
    sys.exit(main())

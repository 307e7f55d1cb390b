"""One part of the proof in processes of its own: `python -m proof.shard PART --of 2` writes JSON."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .planting import preload
from .program_runs import ProgramPiece, digests, pieces, quarter_of, state_pieces
from .verdicts import Budget, chosen, judge
from .workers import share_out

if TYPE_CHECKING:
    from aoffload.testing import Tally

__all__ = ["campaign", "programs", "traces", "worlds"]

LONG_PROGRAMS = 6000
"""Programs between two looks at the clock."""
TRACED_PROGRAMS = 16
"""Programs of each face that are compared between processes."""


def programs(
    num_workers: int,
    num_programs: int,
    seconds: float,
    pieces_of: Callable[[int, int], list[ProgramPiece]] = pieces,
    quarter: int | None = None,
) -> list[dict[str, Any]]:
    """Explore at least `num_programs` programs, in pieces; with `seconds`, go on with new seeds for that long. With
    `quarter`, only that quarter of the pieces."""
    preload()
    began_s = time.monotonic()
    todo = pieces_of(num_programs, 0)
    found = _programs(num_workers, todo if quarter is None else quarter_of(todo, quarter))
    while time.monotonic() - began_s < seconds:
        found += _programs(num_workers, pieces_of(LONG_PROGRAMS, sum(one["programs"] for one in found)))
    return found


def _programs(num_workers: int, todo: Sequence[ProgramPiece]) -> list[dict[str, Any]]:
    def explore(number: int) -> dict[str, Any]:
        began_s, piece = time.monotonic(), todo[number]
        found = piece.explore()
        seconds, broken = time.monotonic() - began_s, len(found["violations"])
        print(f"{seconds:5.1f} s  {found['calls']} calls from {piece}: {broken} violations", flush=True)
        return found

    return share_out(explore, len(todo), num_workers)


def campaign(num_workers: int, depth: int, half: int | None = None) -> list[dict[str, Any]]:
    """Run the campaign, a part for each scenario and backend. With `half`, each scenario on one of the backends, which
    take turns; the other half has the other backend."""
    preload()
    (todo,) = share_out(lambda _: worlds(half), 1, 1)  # in a fork: this process must not import the package
    return share_out(lambda number: _explore(todo[number], depth), len(todo), num_workers)


ON_BOTH = ("run_form",)
"""Scenarios that both halves have on both backends: asyncio alone meets one of the waits of this one."""


def worlds(half: int | None) -> list[int]:
    """The numbers of the scenarios on their backends: all, or those of a half."""
    from .campaign import BACKENDS
    from .scenarios import SCENARIOS

    return [
        number
        for number, (name, _) in enumerate(itertools.product(SCENARIOS, BACKENDS))
        if half is None or name in ON_BOTH or (number // len(BACKENDS) + number) % 2 == half
    ]


def _explore(number: int, depth: int) -> dict[str, Any]:
    from .campaign import BACKENDS, Campaign
    from .scenarios import SCENARIOS

    name, backend = list(itertools.product(SCENARIOS, BACKENDS))[number]
    began_s = time.monotonic()
    found = _as_json(Campaign(depth).run(name, backend))
    print(f"{time.monotonic() - began_s:5.1f} s  {found['runs']} runs of {name} on {backend}", flush=True)
    return found


def _as_json(tally: Tally) -> dict[str, Any]:
    """A tally as JSON."""
    return {
        "runs": tally.num_runs,
        "cancels": tally.num_cancels,
        "checks": tally.num_checks,
        "blocks_checked": tally.num_blocks_checked,
        "distinct": {name: sorted(digest[:22] for digest in found) for name, found in tally.digests.items()},
        "backends": dict(tally.backends),
        "faults": dict(tally.faults),
        "outcomes": dict(tally.outcomes),
        "fates": {kind: dict(found) for kind, found in tally.fates.items()},
        "events": {name: dict(found) for name, found in tally.events.items()},
        "await_lines": sorted(tally.await_lines),
        "violations": tally.violations,
    }


def traces() -> dict[str, Any]:
    """Digests of every decision of one run of each scenario on each backend, and of some programs: equal in every
    process, or seeds do not replay runs."""
    from aoffload.testing import Cancel, Fault, Plan, simulate

    from .campaign import BACKENDS
    from .scenarios import SCENARIOS

    found = digests(TRACED_PROGRAMS)
    for row in SCENARIOS.values():
        for backend in BACKENDS:
            plan = Plan(
                scenario=row.name, backend=backend, seed=7, chooser="pct:3",
                cancels=(Cancel("step", 30, "native"),), faults=(Fault("fail", 1),),
            )  # fmt: skip
            result = simulate(plan, row.run, keep_trace=True)
            text = "\n".join([*map(str, result.trace), *result.log, str(result.outcomes), str(result.violation)])
            found[str(plan)] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proof.shard", description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--of", type=int, default=1, help="worker processes")
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--programs", type=int, default=Budget().programs)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--quarter", type=int)
    parser.add_argument("--half", type=int)
    parser.add_argument("--ninth", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--ranges", type=int, default=Budget().num_ranges)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    given.json.write_text(json.dumps(PARTS[given.part](given)))


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "programs": lambda given: programs(given.of, given.programs, given.seconds, quarter=given.quarter),
    "states": lambda given: programs(given.of, given.programs, given.seconds, state_pieces),
    "campaign": lambda given: campaign(given.of, given.depth, given.half),
    "mutants": lambda given: judge(given.of, chosen(given.ninth, given.only), Budget(given.programs, given.ranges)),
    "traces": lambda given: traces(),
}


if __name__ == "__main__":
    main()

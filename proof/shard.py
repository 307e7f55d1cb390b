"""One part of the proof in processes of its own: `python -m proof.shard campaign|mutants|traces --of 2` writes JSON."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from .planting import preload
from .verdicts import judge
from .workers import share_out

if TYPE_CHECKING:
    from aoffload.testing import Tally

__all__ = ["campaign", "traces"]

LONG_ROUNDS = 4
"""Seeds of each scenario and backend between two looks at the clock."""


ALL_STEPS, FEW_STEPS = 400, 48
"""How far cancellations are swept: to the end if there is time."""


def campaign(num_workers: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The campaign, a part for each scenario and backend; with `seconds`, new seeds until they are over."""
    preload()
    began_s = time.monotonic()
    parts = _campaign(num_workers, Piece(rounds, 1000, sweeps=True, most_swept=ALL_STEPS if seconds else FEW_STEPS))
    first_seed = 1000 + rounds
    while time.monotonic() - began_s < seconds:
        parts += _campaign(num_workers, Piece(LONG_ROUNDS, first_seed, sweeps=False))
        first_seed += LONG_ROUNDS
    return parts


@attrs.frozen
class Piece:
    """What is run of each scenario on each backend."""

    rounds: int
    first_seed: int
    sweeps: bool
    most_swept: int = 0

    def explore(self, number: int) -> dict[str, Any]:
        from .campaign import BACKENDS, Campaign
        from .scenarios import SCENARIOS

        name, backend = list(itertools.product(SCENARIOS, BACKENDS))[number]
        began_s = time.monotonic()
        found = _told(Campaign(self.rounds, self.first_seed, self.sweeps, self.most_swept).run(name, backend))
        print(f"{time.monotonic() - began_s:5.1f} s  {found['runs']} runs of {name} on {backend}", flush=True)
        return found


def _campaign(num_workers: int, piece: Piece) -> list[dict[str, Any]]:
    (num_worlds,) = share_out(lambda _: _num_worlds(), 1, 1)  # in a fork: this process must not import the package
    return share_out(piece.explore, num_worlds, num_workers)


def _num_worlds() -> int:
    from .campaign import BACKENDS
    from .scenarios import SCENARIOS

    return len(SCENARIOS) * len(BACKENDS)


def _told(tally: Tally) -> dict[str, Any]:
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
    """Every decision of one run of each scenario on each backend, as a digest: equal in every process, or no seed
    replays anything."""
    from aoffload.testing import Cancel, Fault, Plan, simulate

    from .campaign import BACKENDS
    from .scenarios import SCENARIOS

    found: dict[str, str] = {}
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
    parser.add_argument("part", choices=["campaign", "mutants", "traces"])
    parser.add_argument("--of", type=int, default=1, help="worker processes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    found: Any
    if given.part == "campaign":
        found = campaign(given.of, given.rounds, given.seconds)
    elif given.part == "mutants":
        found = judge(given.of)
    else:
        found = traces()
    given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

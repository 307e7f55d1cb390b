"""One process's part of the proof: `python -m proof.shard campaign|mutants|traces --share 0 --of 2` writes JSON."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from .verdicts import judge

__all__ = ["campaign", "traces"]


def campaign(share: int, of: int, rounds: int, seconds: float) -> dict[str, Any]:
    """The campaign's share; with `seconds`, new seeds until they are over."""
    from aoffload.testing import Tally

    from .campaign import Campaign

    tally = Tally()
    began_s = time.monotonic()
    Campaign(rounds, share, of).run(tally)
    first_seed = 1000 + rounds
    while time.monotonic() - began_s < seconds:
        Campaign(2, share, of, first_seed=first_seed, sweeps=False).run(tally)
        first_seed += 2
    return {
        "runs": tally.num_runs,
        "seconds": time.monotonic() - began_s,
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
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    if given.part == "campaign":
        found = campaign(given.share, given.of, given.rounds, given.seconds)
    elif given.part == "mutants":
        found = {"rows": judge(given.of)}
    else:
        found = traces()
    given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

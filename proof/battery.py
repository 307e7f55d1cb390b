"""The battery: the same thousand simulated runs for every mutant that scenarios can meet, until a run breaks a law.

A mutant may name the scenarios that are about what it breaks: then all its runs are of those. A mutant that no
simulated run can meet names a test instead. The package without a defect has to pass everything that judged a mutant.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from aoffload.testing import Result, Violation, explain

from .campaign import BACKENDS, Campaign
from .scenarios import SCENARIOS

__all__ = ["detect", "runs"]

FIRST_SEED = 5000
MOST_SECONDS = 4.0
"""CPU seconds of this process for one run, which takes milliseconds: enough on any machine, however slow or busy."""


def runs(scenarios: Sequence[str] = ()) -> Iterator[Result]:
    """Runs of `scenarios` (all, if none is named) in turn, on both backends in turn, with and without injections."""
    campaign = Campaign()
    rows = [SCENARIOS[name] for name in scenarios or SCENARIOS]
    for seed in itertools.count(FIRST_SEED):
        for number, row in enumerate(rows):
            backend = BACKENDS[(number + seed) % len(BACKENDS)]
            yield from campaign.sampled(row, backend, seed, num_injected=3)


def watched(results: Iterator[Result]) -> Iterator[Result]:
    """Limit each run to `MOST_SECONDS`: an endless loop inside one step is a violation like any other."""

    def out_of_time(signal_number: int, frame: object) -> None:
        raise Violation("a hang", f"one run took more than {MOST_SECONDS} s")

    signal.signal(signal.SIGPROF, out_of_time)
    try:
        while True:
            # Again every second: a handler that swallows every exception may swallow the first violation.
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS, 1.0)
            yield next(results)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def detect(argument: Any) -> dict[str, Any]:
    """The first violation within `argument["runs"]` runs of `argument["scenarios"]`: by which oracle, in which run."""
    most = argument["runs"]
    for number, result in enumerate(watched(runs(argument["scenarios"])), start=1):
        if result.violation is not None:
            plan, violation = str(result.plan), result.violation
            return {"violation": str(violation), "oracle": violation.oracle, "runs": number, "plan": plan}
        if number >= most:
            break
    return {"violation": None, "oracle": None, "runs": most, "plan": None}


def story(plan: str) -> str:
    """A broken run as text."""
    from aoffload.testing import replay

    scenario = next(word.partition("=")[2] for word in plan.split() if word.startswith("scenario="))
    return explain(replay(plan, SCENARIOS[scenario].run))

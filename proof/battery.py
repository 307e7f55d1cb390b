"""The battery: the same thousand runs for every mutant that is to be met there, until one of them breaks.

A mutant may name the scenarios whose hazard it is: all of its runs are of those. One that no simulated run can meet
names a test instead. Whatever a mutant was judged by, the program without it has to pass.
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
"""Of this process's own time for one run, which takes milliseconds: no machine is slow enough, and none too busy."""


def runs(scenarios: Sequence[str] = ()) -> Iterator[Result]:
    """`scenarios` (all, if none is named) in turn, on both backends in turn, undisturbed and injected into."""
    campaign = Campaign()
    rows = [SCENARIOS[name] for name in scenarios or SCENARIOS]
    for seed in itertools.count(FIRST_SEED):
        for number, row in enumerate(rows):
            backend = BACKENDS[(number + seed) % len(BACKENDS)]
            yield from campaign.sampled(row, backend, seed, num_injected=3)


def watched(results: Iterator[Result]) -> Iterator[Result]:
    """Each run within `MOST_SECONDS`: a loop that never ends inside of one step is a violation like any other."""

    def out_of_time(signal_number: int, frame: object) -> None:
        raise Violation("a hang", f"one run took more than {MOST_SECONDS} s")

    signal.signal(signal.SIGPROF, out_of_time)
    try:
        while True:
            # Again every second: the first one may end in a handler that survives whatever it is given.
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
    """A broken run for a person."""
    from aoffload.testing import replay

    scenario = next(word.partition("=")[2] for word in plan.split() if word.startswith("scenario="))
    return explain(replay(plan, SCENARIOS[scenario].run))

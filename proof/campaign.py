"""The campaign: which runs are made of every scenario.

For each scenario and backend, there are three kinds of runs, and `depth` scales the number of each:

- A sweep of one seed. Clients are cancelled at their checkpoints and at global steps. Faults are injected at their
  opportunities, either once or from then on.
- Schedules that deviate from the fair one at up to two points.
- A sample of other seeds, without injections and with two: two cancellations, two faults, or one of each.

If a sampled run waits at an `await` line of the package where no run has cancelled a task yet, another run cancels a
task there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import attrs

from aoffload.testing import FAULTS, HOWS, Cancel, Fault, Plan, Result, Tally, simulate
from aoffload.testing.explore import CHOOSERS, cancel_sweep, exhaust, fault_sweep
from aoffload.testing.faults import DISK_FAULTS, REMOTE_FAULTS
from aoffload.testing.plans import Backend

from .scenarios import SCENARIOS, ScenarioRow

__all__ = ["BACKENDS", "Campaign"]

BACKENDS: tuple[Backend, ...] = ("asyncio", "trio")
MOST_SEEDS = 24
ENOUGH_TRACES = 70
"""Distinct traces of a scenario on one backend: where there are few choices, more seeds are sampled to get so many."""
BELOW_HOST = (*DISK_FAULTS, *REMOTE_FAULTS)
"""Faults that take a tier that most scenarios lack."""
AT_ANY_STEP = ("leap", "block", "worker")
"""Faults with an opportunity at every step: sampled, not swept."""


@attrs.frozen
class Campaign:
    """The runs of a scenario on a backend."""

    depth: int = 1
    first_seed: int = 1000

    def run(self, name: str, backend: Backend) -> Tally:
        tally, row = Tally(), SCENARIOS[name]
        for result in self.swept(row, backend):
            tally.add(result)
        for number in range(MOST_SEEDS * self.depth):
            if number >= 3 * self.depth and len(tally.digests[name]) >= ENOUGH_TRACES:
                break
            seed = self.first_seed + number
            for result in self.sampled(row, backend, seed):
                tally.add(result)
                for aimed in self.aimed(row, result, tally):
                    tally.add(aimed)
        return tally

    def swept(self, row: ScenarioRow, backend: Backend) -> Iterator[Result]:
        plan = Plan(scenario=row.name, backend=backend, seed=self.first_seed - 1)
        base = simulate(plan, row.run)
        yield base
        for victim in base.suspensions:
            yield from cancel_sweep(plan, row.run, victim, "native", 4 * self.depth, shuffled=True)
        yield from cancel_sweep(plan, row.run, "step", "request*2", 10 * self.depth, shuffled=True)
        for kind in FAULTS:
            if kind not in AT_ANY_STEP and (kind not in BELOW_HOST or base.opportunities[kind]):
                yield from fault_sweep(plan, row.run, kind, at_most=self.depth, shuffled=True)
                yield from fault_sweep(plan, row.run, kind, lasting=True, at_most=self.depth, shuffled=True)
        yield from exhaust(plan, row.run, num_deviations=2, at_most=3 * self.depth)

    @staticmethod
    def aimed(row: ScenarioRow, base: Result, tally: Tally) -> Iterator[Result]:
        """`base` again, with a cancellation at each line where it waits and none has met a task so far."""
        for line, cancel in base.waits.items():
            if line not in tally.await_lines:
                yield simulate(attrs.evolve(base.plan, cancels=(cancel,)), row.run)

    def sampled(self, row: ScenarioRow, backend: Backend, seed: int, num_injected: int = 6) -> Iterator[Result]:
        """One run with nothing injected, and `num_injected` with cancellations, faults or both."""
        rng = random.Random(f"{row.name} {backend} {seed}")
        plan = Plan(scenario=row.name, backend=backend, seed=seed, chooser=CHOOSERS[seed % len(CHOOSERS)])
        base = simulate(plan, row.run, note_waits=True)
        yield base
        for number in range(num_injected):
            num_cancels, num_faults = ((2, 0), (0, 2), (1, 1))[number % 3]
            yield simulate(
                attrs.evolve(
                    plan, chooser=rng.choice(CHOOSERS), seed=seed * 10 + number,
                    cancels=tuple(self._cancel(rng, base) for _ in range(num_cancels)),
                    faults=tuple(self._fault(rng, row, base) for _ in range(num_faults)),
                ),
                row.run, note_waits=not num_cancels,
            )  # fmt: skip

    @staticmethod
    def _cancel(rng: random.Random, base: Result) -> Cancel:
        if rng.random() < 0.3:
            return Cancel("step", rng.randrange(max(1, base.num_steps)), rng.choice(HOWS))
        victim = rng.choice(list(base.suspensions))
        return Cancel(victim, rng.randrange(max(1, base.suspensions[victim])), rng.choice(HOWS))

    @staticmethod
    def _fault(rng: random.Random, row: ScenarioRow, base: Result) -> Fault:
        possible = [kind for kind in FAULTS if kind in AT_ANY_STEP or base.opportunities[kind]]
        wanted = [kind for kind in row.faults if base.opportunities[kind]]
        kind = rng.choice(wanted if wanted and rng.random() < 0.6 else possible)
        if kind in AT_ANY_STEP:
            return Fault(kind, rng.randrange(max(1, base.num_steps)))
        return Fault(kind, rng.randrange(base.opportunities[kind]), rng.random() < 0.4)

"""The campaign: which runs are made of every scenario, and what they have to add up to.

For each scenario and backend: one seed is swept (every client cancelled at every checkpoint and at every global step,
every fault at every opportunity, once and from then on), the schedules next to the fair one are exhausted, and many
seeds are sampled with nothing, a cancellation, a fault, or a pair of them injected.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import attrs

from aoffload.testing import FAULTS, HOWS, Cancel, Fault, Plan, Result, Tally, simulate
from aoffload.testing.explore import CHOOSERS, cancel_sweep, exhaust, fault_sweep
from aoffload.testing.simulation import Backend

from .scenarios import SCENARIOS, ScenarioRow

__all__ = ["BACKENDS", "Campaign"]

BACKENDS: tuple[Backend, ...] = ("asyncio", "trio")
AT_ANY_STEP = ("leap", "block", "worker")
"""Faults with an opportunity at every step: sampled, not swept."""


@attrs.frozen
class Campaign:
    """`share` of `of` equal parts; two processes run one each."""

    rounds: int
    """Seeds that are sampled for each scenario and backend."""
    share: int = 0
    of: int = 1
    first_seed: int = 1000

    def run(self, tally: Tally) -> None:
        worlds = [(row, backend) for row in SCENARIOS.values() for backend in BACKENDS]
        for row, backend in worlds[self.share :: self.of]:
            for result in self.results(row, backend):
                tally.add(result)

    def results(self, row: ScenarioRow, backend: Backend) -> Iterator[Result]:
        yield from self.swept(row, backend)
        for number in range(self.rounds):
            yield from self.sampled(row, backend, self.first_seed + number)

    def swept(self, row: ScenarioRow, backend: Backend) -> Iterator[Result]:
        plan = Plan(scenario=row.name, backend=backend, seed=self.first_seed - 1)
        base = simulate(plan, row.run)
        yield base
        for victim in base.suspensions:
            yield from cancel_sweep(plan, row.run, victim, "native")
            yield from cancel_sweep(plan, row.run, victim, "request*2")
        yield from cancel_sweep(plan, row.run, "step", "native*2")
        for kind in FAULTS:
            if kind not in AT_ANY_STEP:
                for lasting in (False, True):
                    yield from fault_sweep(plan, row.run, kind, lasting, at_most=25)
        yield from exhaust(plan, row.run, num_deviations=2, at_most=60)

    def sampled(self, row: ScenarioRow, backend: Backend, seed: int) -> Iterator[Result]:
        """One run with nothing injected, and as many with something as make the sample worth its name."""
        rng = random.Random(f"{row.name} {backend} {seed}")
        plan = Plan(scenario=row.name, backend=backend, seed=seed, chooser=CHOOSERS[seed % len(CHOOSERS)])
        base = simulate(plan, row.run)
        yield base
        for number in range(6):
            chosen = attrs.evolve(plan, chooser=rng.choice(CHOOSERS), seed=seed * 10 + number)
            cancels = (self._cancel(rng, base),) if number % 3 != 1 else ()
            faults = (self._fault(rng, base),) if number % 3 != 0 else ()
            if rng.random() < 0.3:
                cancels = (*cancels, self._cancel(rng, base))
            yield simulate(attrs.evolve(chosen, cancels=cancels, faults=faults), row.run)

    @staticmethod
    def _cancel(rng: random.Random, base: Result) -> Cancel:
        if rng.random() < 0.3:
            return Cancel("step", rng.randrange(max(1, base.num_steps)), rng.choice(HOWS))
        victim = rng.choice(list(base.suspensions))
        return Cancel(victim, rng.randrange(max(1, base.suspensions[victim])), rng.choice(HOWS))

    @staticmethod
    def _fault(rng: random.Random, base: Result) -> Fault:
        possible = [kind for kind in FAULTS if kind in AT_ANY_STEP or base.opportunities[kind]]
        kind = rng.choice(possible)
        if kind in AT_ANY_STEP:
            return Fault(kind, rng.randrange(max(1, base.num_steps)))
        return Fault(kind, rng.randrange(base.opportunities[kind]), rng.random() < 0.4)

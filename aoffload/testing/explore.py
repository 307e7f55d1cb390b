"""Exploration: many runs of a scenario, and shrinking a broken run to the few decisions that matter."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterator

import attrs

from .choosers import Exactly
from .faults import Fault
from .injection import Cancel
from .plans import Plan, Result
from .simulation import Scenario, simulate

__all__ = ["Tally", "cancel_sweep", "exhaust", "explain", "fault_sweep", "replay", "shrink"]

CHOOSERS = ("random", "pct:2", "pct:3", "random", "pct:5")


def cancel_sweep(
    plan: Plan, scenario: Scenario, victim: str, how: str, at_most: int = 400, *, shuffled: bool = False
) -> Iterator[Result]:
    """Cancel `victim` at its first checkpoint, its second, ... until it completes. With the victim `step`, cancel at
    every global step. `shuffled`: each run in another order of the same workload, which finds more."""
    for at in range(at_most):
        injected = attrs.evolve(plan, cancels=(*plan.cancels, Cancel(victim, at, how)))
        result = simulate(_reordered(injected) if shuffled else injected, scenario)
        yield result
        if result.num_cancels == 0:
            return


def fault_sweep(
    plan: Plan, scenario: Scenario, kind: str, lasting: bool = False, at_most: int = 400, *, shuffled: bool = False
) -> Iterator[Result]:
    """Inject the fault at its first opportunity, its second, ... until none is left. `shuffled`: see `cancel_sweep`."""
    for at in range(at_most):
        injected = attrs.evolve(plan, faults=(*plan.faults, Fault(kind, at, lasting)))
        result = simulate(_reordered(injected) if shuffled else injected, scenario)
        yield result
        if not result.faults[kind]:
            return


def _reordered(plan: Plan) -> Plan:
    """The plan with a random order derived from the plan alone."""
    return attrs.evolve(plan, chooser=f"random:{zlib.crc32(str(plan).encode())}")


def exhaust(plan: Plan, scenario: Scenario, num_deviations: int = 2, at_most: int = 2000) -> Iterator[Result]:
    """Run every schedule that differs from the fair one in up to `num_deviations` decisions, nearest first
    (delay-bounded search; Emmi et al., POPL 2011), or the first `at_most` of them."""
    todo: deque[dict[int, int]] = deque([{}])
    for _ in range(at_most):
        if not todo:
            return
        decisions = todo.popleft()
        result = simulate(attrs.evolve(plan, chooser=str(Exactly(decisions))), scenario, keep_trace=True)
        yield result
        if len(decisions) < num_deviations:
            last = max(decisions, default=-1)
            later = (decision for decision in result.trace if decision.step > last)
            todo.extend({**decisions, one.step: index} for one in later for index in range(1, one.num_options))


def replay(line: str, scenario: Scenario) -> Result:
    """Run a printed plan again, and record its trace and its log."""
    return simulate(Plan.parse(line), scenario, keep_trace=True)


def shrink(plan: Plan, scenario: Scenario, at_most: int = 300) -> Result:
    """Search, in `at_most` runs, for a run that breaks the same law with as few injections and as few unfair decisions
    as possible."""
    best = simulate(plan, scenario, keep_trace=True)
    assert best.violation is not None, f"nothing is broken by {plan}"
    oracle = best.violation.oracle
    num_left = at_most

    def breaks(candidate: Plan) -> Result | None:
        nonlocal num_left
        num_left -= 1
        found = simulate(candidate, scenario, keep_trace=True) if num_left >= 0 else None
        is_same = found is not None and found.violation is not None and found.violation.oracle == oracle
        return found if is_same else None

    for cancel in plan.cancels:
        fewer_cancels = tuple(other for other in best.plan.cancels if other is not cancel)
        best = breaks(attrs.evolve(best.plan, cancels=fewer_cancels)) or best
    for fault in plan.faults:
        fewer_faults = tuple(other for other in best.plan.faults if other is not fault)
        best = breaks(attrs.evolve(best.plan, faults=fewer_faults)) or best
    decisions = {decision.step: decision.index for decision in best.trace if decision.index}
    size = max(1, len(decisions) // 2)
    while size and num_left > 0:
        steps = sorted(decisions)
        for start in range(0, len(steps), size):
            fewer = {step: index for step, index in decisions.items() if step not in steps[start : start + size]}
            found = breaks(attrs.evolve(best.plan, chooser=str(Exactly(fewer))))
            if found is not None:
                best, decisions = found, fewer
        size //= 2
    return best


def explain(result: Result) -> str:
    """A broken run as text: its replay command, the violation, and the log with the unfair decisions by step."""
    lines = [str(result.plan), f"  {result.violation}" if result.violation else "  nothing is broken", ""]
    events = [(line[:5], line) for line in result.log]
    events += [(str(one)[:5], f"{one}   <- not the oldest") for one in result.trace if one.index]
    return "\n".join(lines + [line for _, line in sorted(events, key=lambda event: event[0])])


@attrs.define
class Tally:
    """Totals of a campaign."""

    min_choices: int = 20
    """Runs with fewer real choices do not count as explored."""
    num_runs: int = 0
    num_cancels: int = 0
    num_checks: int = 0
    num_blocks_checked: int = 0
    digests: dict[str, set[str]] = attrs.field(factory=dict)
    """Digests of the runs that count as explored, by scenario."""
    backends: Counter[str] = attrs.field(factory=Counter)
    faults: Counter[str] = attrs.field(factory=Counter)
    """Number of runs that met each kind of fault. A lasting fault counts once."""
    outcomes: Counter[str] = attrs.field(factory=Counter)
    fates: dict[str, Counter[str]] = attrs.field(factory=dict)
    """Outcomes of clients in runs with one kind of fault and no cancellation, by that kind."""
    events: dict[str, Counter[str]] = attrs.field(factory=dict)
    await_lines: set[tuple[str, int]] = attrs.field(factory=set)
    violations: list[tuple[str, str]] = attrs.field(factory=list)
    """Plans and their violations."""

    def add(self, result: Result) -> None:
        plan = result.plan
        self.num_runs += 1
        self.num_cancels += result.num_cancels
        self.num_checks += result.num_checks
        self.num_blocks_checked += result.num_blocks_checked
        self.backends[plan.backend] += 1
        self.faults.update(set(result.faults))
        self.await_lines |= result.await_lines
        self.events.setdefault(plan.scenario, Counter()).update(result.counts)
        digests = self.digests.setdefault(plan.scenario, set())
        if result.num_choices >= self.min_choices:
            digests.add(f"{plan.backend} {result.digest}")
        for outcome in result.outcomes.values():
            self.outcomes[outcome] += 1
        if len(result.faults) == 1 and not result.num_cancels:
            (kind,) = result.faults
            self.fates.setdefault(kind, Counter()).update(result.outcomes.values())
        if result.violation is not None:
            self.violations.append((str(plan), str(result.violation)))

    @property
    def num_distinct(self) -> int:
        return sum(len(digests) for digests in self.digests.values())

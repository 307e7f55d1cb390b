"""The report of the proof: figures with their targets, and the tables that they summarise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from aoffload.testing import FAULTS

from . import report_mutants, report_programs
from .awaits import NEVER_THERE, missed, waits
from .report_lines import Line, at_least, table
from .scenarios import SCENARIOS

__all__ = ["Report"]

MIN_CHOICES = 20


def _total(parts: Iterable[dict[str, Any]], name: str) -> int:
    return sum(part[name] for part in parts)


def _sum(parts: Iterable[dict[str, Any]], name: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in parts:
        found.update(part[name])
    return found


@attrs.define
class Report:
    """`programs`, `states`, `campaign`, `mutants`, `traces` and `soaks` are what the processes wrote; a part that was
    not run is empty. With `is_short`, the minima are lower."""

    programs: list[dict[str, Any]] = attrs.field(factory=list)
    states: list[dict[str, Any]] = attrs.field(factory=list)
    campaign: list[dict[str, Any]] = attrs.field(factory=list)
    mutants: list[dict[str, Any]] = attrs.field(factory=list)
    traces: list[dict[str, str]] = attrs.field(factory=list)
    soaks: list[dict[str, Any]] = attrs.field(factory=list)
    seconds: float = 0.0
    is_short: bool = False
    min_distinct: int = 6_000
    min_per_scenario: int = 100
    min_injected: int = 3_000

    def _least(self, number: int) -> int:
        """The minimum for a count of the campaign: half of `number` in the short form, which runs half of it."""
        return number // 2 if self.is_short else number

    def lines(self) -> list[Line]:
        found: list[Line] = []
        if self.programs:
            found += report_programs.lines(self.programs, is_short=self.is_short)
        if self.states:
            found += report_programs.state_lines(self.states)
        if self.campaign:
            found += self._campaign_lines()
        if self.mutants:
            found += report_mutants.lines(self.mutants)
        if self.traces:
            same = all(one == self.traces[0] for one in self.traces)
            about = f"{len(self.traces[0])} runs in {len(self.traces)} processes, 2 values of PYTHONHASHSEED"
            found.append(Line("identical traces", "every decision", about, same))
        for soak in self.soaks:
            found.append(Line(f"soak, {soak['backend']}", "passed", soak["about"], soak["passed"]))
        return found

    @property
    def is_met(self) -> bool:
        return all(line.is_met for line in self.lines())

    def distinct(self) -> dict[str, int]:
        """Distinct decision traces by scenario."""
        sets: dict[str, set[str]] = {name: set() for name in SCENARIOS}
        for part in self.campaign:
            for name, digests in part["distinct"].items():
                sets[name].update(digests)
        return {name: len(digests) for name, digests in sets.items()}

    def _campaign_lines(self) -> list[Line]:
        parts, distinct = self.campaign, self.distinct()
        faults, hit = _sum(parts, "faults"), [(path, line) for part in parts for path, line in part["await_lines"]]
        least = min(distinct, key=lambda name: distinct[name])
        broken = [tuple(one) for part in parts for one in part["violations"]]
        never = [kind for kind in FAULTS if not faults[kind]]
        absent = self._absent_events()
        # A third, not half: the short form runs a scenario on one backend, which may have fewer traces than the other.
        least_of_each = self.min_per_scenario // 3 if self.is_short else self.min_per_scenario
        backends = " + ".join(f"{number:,} on {name}" for name, number in sorted(_sum(parts, "backends").items()))
        return [
            Line("runs", "both backends", f"{backends}, {_total(parts, 'checks'):,} full checks", True),
            Line("violations", "0", f"{len(broken)} {broken[:3] or ''}", not broken),
            at_least(
                f"distinct traces of {MIN_CHOICES} and more choices",
                sum(distinct.values()),
                self._least(self.min_distinct),
            ),
            at_least(f"the least explored scenario ({least})", distinct[least], least_of_each),
            at_least("cancellations", _total(parts, "cancels"), self._least(self.min_injected)),
            Line("await lines hit", "all", self._awaits(hit), not missed(hit)),
            at_least(
                "injected faults (one that lasts counts once)", sum(faults.values()), self._least(self.min_injected)
            ),
            Line("kinds of fault that never fired", "none", f"{never or 'none'} of {len(FAULTS)}", not never),
            Line("events that a scenario is for and never had", "none", f"{absent or 'none'}", not absent),
        ]

    def _awaits(self, hit: Sequence[tuple[str, int]]) -> str:
        never = [str(one) for one in missed(hit)]
        return f"{len(waits()) - len(never)} of {len(waits())}, {len(NEVER_THERE)} pieces exempt {never or ''}"

    def _absent_events(self) -> list[str]:
        events: dict[str, Counter[str]] = {name: Counter() for name in SCENARIOS}
        for part in self.campaign:
            for name, counts in part["events"].items():
                events[name].update(counts)
        return [
            f"{row.name}: {event}" for row in SCENARIOS.values() for event in row.events if not events[row.name][event]
        ]

    # -- for people -----------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        parts = ["# The proof\n", f"{self.seconds:.0f} seconds in all.\n"]
        parts += [
            table(
                ("", "line", "found", "wanted"),
                [("ok" if x.is_met else "FAIL", x.what, x.found, x.target) for x in self.lines()],
            )
        ]
        if self.programs:
            parts += report_programs.tables(self.programs)
        if self.states:
            parts += report_programs.state_tables(self.states)
        if self.campaign:
            parts += ["\n## Scenarios\n", self._scenario_table(), "\n## Faults\n", self._fault_table()]
        if self.mutants:
            parts += ["\n## Mutants\n", report_mutants.mutant_table(self.mutants)]
        return "\n".join(parts) + "\n"

    def _scenario_table(self) -> str:
        distinct = self.distinct()
        rows = [(row.name, f"{distinct[row.name]:,}", row.about.splitlines()[0]) for row in SCENARIOS.values()]
        return table(("scenario", "distinct traces", "what it is about"), rows)

    def _fault_table(self) -> str:
        outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in FAULTS}
        for part in self.campaign:
            for kind, counts in part["fates"].items():
                outcomes[kind].update(counts)
        faults = _sum(self.campaign, "faults")
        rows = [
            (
                kind.name,
                kind.about,
                str(faults[kind.name]),
                *(str(outcomes[kind.name][letter]) for letter in "DRAX"),
            )
            for kind in FAULTS.values()
        ]
        return table(("fault", "what happens", "runs", "D", "R", "A", "X"), rows)

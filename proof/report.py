"""What the parts of the proof add up to: each line with its target beside it, and the tables behind the lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from aoffload.testing import FAULTS

from .awaits import NEVER_THERE, missed, waits
from .scenarios import SCENARIOS
from .verdicts import TWIN

__all__ = ["Line", "Report"]

MIN_CHOICES = 20


@attrs.frozen
class Line:
    what: str
    target: str
    found: str
    is_met: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.is_met else 'FAIL'}  {self.what}: {self.found} (wanted: {self.target})"


def at_least(what: str, found: int, wanted: int) -> Line:
    return Line(what, f"at least {wanted:,}", f"{found:,}", found >= wanted)


def _total(parts: Iterable[dict[str, Any]], name: str) -> int:
    return sum(part[name] for part in parts)


def _sum(parts: Iterable[dict[str, Any]], name: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in parts:
        found.update(part[name])
    return found


@attrs.define
class Report:
    """`campaign`, `mutants`, `traces` and `soaks` are what the processes wrote; a part that was not run is empty."""

    campaign: list[dict[str, Any]]
    mutants: list[dict[str, Any]]
    traces: list[dict[str, str]]
    soaks: list[dict[str, Any]]
    seconds: float = 0.0
    min_distinct: int = 30_000
    min_per_scenario: int = 500
    min_injected: int = 20_000

    def lines(self) -> list[Line]:
        found: list[Line] = []
        if self.campaign:
            found += self._campaign_lines()
        if self.mutants:
            found += self._mutant_lines()
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
        backends = " + ".join(f"{number:,} on {name}" for name, number in sorted(_sum(parts, "backends").items()))
        return [
            Line("runs", "both backends", f"{backends}, {_total(parts, 'checks'):,} full checks", True),
            Line("violations", "0", f"{len(broken)} {broken[:3] or ''}", not broken),
            at_least(f"distinct traces of {MIN_CHOICES} and more choices", sum(distinct.values()), self.min_distinct),
            at_least(f"the least explored scenario ({least})", distinct[least], self.min_per_scenario),
            at_least("cancellations", _total(parts, "cancels"), self.min_injected),
            Line("await lines hit", "all", self._awaits(hit), not missed(hit)),
            at_least("injected faults (one that lasts counts once)", sum(faults.values()), self.min_injected),
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

    def _rows(self) -> list[dict[str, Any]]:
        return self.mutants

    def _mutant_lines(self) -> list[Line]:
        rows = self._rows()
        twins = [row for row in rows if row["mutant"] == TWIN]
        planted = [row for row in rows if row["mutant"] != TWIN]
        survivors = [row["mutant"] for row in planted if row["oracle"] is None]
        by_test = [row["mutant"] for row in planted if row["oracle"] == "test"]
        runs = sorted(row["runs"] for row in planted if row["oracle"] and row["runs"])
        median, most = (runs[len(runs) // 2], runs[-1]) if runs else (0, 0)
        about = f"{len(runs)} of {len(planted)}, median {median}, most {most} runs"
        tests = ", ".join(by_test)
        return [
            Line("mutants caught by an oracle within 1,000 simulated runs", "all but those below", about, bool(runs)),
            Line("mutants that a named test catches, as no oracle does", "listed", f"{len(by_test)}: {tests}", True),
            Line("mutants that nothing catches", "none", f"{len(survivors)} {survivors or ''}", not survivors),
            self._twin_line(twins),
        ]

    def _twin_line(self, twins: Sequence[dict[str, Any]]) -> Line:
        broken = [row for row in twins if row["oracle"] is not None]
        about = f"clean in {sum(row['runs'] or 0 for row in twins):,} runs and in the named tests"
        met = not broken and bool(twins)
        return Line("the twin without a defect, by whatever judged them", "clean", str(broken or about), met)

    # -- for people -----------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        parts = ["# The proof\n", f"{self.seconds:.0f} seconds in all.\n"]
        parts += [
            _table(
                ("", "line", "found", "wanted"),
                [("ok" if x.is_met else "FAIL", x.what, x.found, x.target) for x in self.lines()],
            )
        ]
        if self.campaign:
            parts += ["\n## Scenarios\n", self._scenario_table(), "\n## Faults\n", self._fault_table()]
        if self.mutants:
            parts += ["\n## Mutants\n", self._mutant_table()]
        return "\n".join(parts) + "\n"

    def _scenario_table(self) -> str:
        distinct = self.distinct()
        rows = [(row.name, f"{distinct[row.name]:,}", row.about.splitlines()[0]) for row in SCENARIOS.values()]
        return _table(("scenario", "distinct traces", "what it is about"), rows)

    def _fault_table(self) -> str:
        fates: dict[str, Counter[str]] = {kind: Counter() for kind in FAULTS}
        for part in self.campaign:
            for kind, counts in part["fates"].items():
                fates[kind].update(counts)
        faults = _sum(self.campaign, "faults")
        rows = [
            (kind.name, kind.about, str(faults[kind.name]), *(str(fates[kind.name][fate]) for fate in "DRAX"))
            for kind in FAULTS.values()
        ]
        return _table(("fault", "what happens", "runs", "D", "R", "A", "X"), rows)

    def _mutant_table(self) -> str:
        rows: list[tuple[str, ...]] = []
        for row in self._rows():
            if row["mutant"] != TWIN:
                module = row["module"].removeprefix("aoffload.")
                where = " ".join(row["scenarios"]) or row["test"] or "all scenarios"
                about = (row["promise"], row["oracle"] or "SURVIVED", str(row["runs"] or "-"), where)
                rows.append((row["mutant"], module, *about))
        return _table(("mutant", "module", "promise it breaks", "caught by", "after runs", "of"), sorted(rows))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

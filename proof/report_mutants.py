"""The report on planted defects: what caught each of them, and after how many runs and calls."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Any

import attrs

from .report_lines import Line, table
from .verdicts import TWIN

__all__ = ["MutantVerdict", "mutant_verdicts", "lines", "mutant_table"]

Rows = Sequence[dict[str, Any]]


@attrs.frozen
class MutantVerdict:
    """The verdict on a mutant: a row for everything that it was shown to."""

    name: str
    rows: Rows

    @property
    def caught(self) -> Rows:
        return [row for row in self.rows if row["oracle"]]

    @property
    def judge(self) -> str:
        """What caught it; empty if it survived. Of several ranges of seeds, more than half have to catch it."""
        if 2 * len(self.caught) > len(self.rows):
            return str(self.caught[0]["judge"])
        return ""

    def after(self, what: str) -> int:
        """Runs, calls, or calls of the shortest program: the median over the ranges of seeds."""
        found = [row[what] for row in self.caught if row[what] is not None]
        return median_low(found) if found else 0


def mutant_verdicts(rows: Rows) -> list[MutantVerdict]:
    """The fate of each mutant, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["mutant"] != TWIN:
            found.setdefault(row["mutant"], []).append(row)
    return [MutantVerdict(name, found[name]) for name in sorted(found)]


def lines(rows: Rows) -> list[Line]:
    all_of_them = mutant_verdicts(rows)

    def of(judge: str) -> list[MutantVerdict]:
        return [verdict for verdict in all_of_them if verdict.judge == judge]

    tested = of("test")
    survivors = [_survivor(verdict) for verdict in all_of_them if not verdict.judge]
    return [
        Line("mutants caught in simulated runs of scenarios", "listed", _spread(of("scenarios")), True),
        Line("mutants caught by programs", "listed", _spread(of("programs")), True),
        Line("mutants caught by the test that they name", "listed", str(len(tested)), True),
        Line("mutants that nothing catches", "none", f"{len(survivors)} {survivors or ''}", not survivors),
        _twin_line([row for row in rows if row["mutant"] == TWIN]),
    ]


def _spread(found: Sequence[MutantVerdict]) -> str:
    after = sorted(verdict.after("runs") for verdict in found)
    return f"{len(found)}, median after {median_low(after):,}, most {after[-1]:,}" if found else "0"


def _twin_line(twins: Rows) -> Line:
    broken = [row for row in twins if row["oracle"] is not None]
    shown = {
        judge: sum(row["runs"] or 0 for row in twins if row["judge"] == judge) for judge in ("scenarios", "programs")
    }
    about = f"clean in {shown['scenarios']:,} runs, {shown['programs']:,} programs and the named tests"
    met = not broken and bool(twins)
    return Line("the twin without a defect, by whatever judged them", "clean", str(broken or about), met)


def mutant_table(rows: Rows) -> str:
    """The mutants in a markdown table."""
    head = ("mutant", "module", "promise it breaks", "caught by", "after", "calls", "shortened to", "of")
    return table(head, map(_cells, mutant_verdicts(rows)))


def _survivor(verdict: MutantVerdict) -> str:
    """The name of a mutant that nothing catches, with the way in which its judge ended, if it has given no result."""
    detail = str(verdict.rows[-1]["detail"] or "")
    return f"{verdict.name} ({detail})" if detail else verdict.name


def _cells(verdict: MutantVerdict) -> tuple[str, ...]:
    row = (verdict.caught or verdict.rows)[-1]
    where = {"scenarios": " ".join(row["scenarios"]) or "all scenarios", "test": row["test"], "programs": "programs"}
    figures = (str(verdict.after(what) or "-") for what in ("runs", "calls", "shortest"))
    module = row["module"].removeprefix("aoffload.")
    oracle = (row["oracle"] or "SURVIVED") if verdict.judge else "SURVIVED"
    if len(verdict.rows) > 1:
        oracle += f", in {len(verdict.caught)} of {len(verdict.rows)} ranges"
    return (verdict.name, module, row["promise"], oracle, *figures, where[row["judge"]])

"""What became of vLLM's own tests, and what that means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EXCUSED", "READS", "REFUSED", "Case", "count", "missed", "table"]

READS = "reads"
"""A test that failed because it reads an attribute that only vLLM's manager has."""
REFUSED = "refused"
"""A test that configures what the connector refuses."""

EXCUSED: Mapping[str, str] = {}


@dataclass(frozen=True)
class Case:
    name: str
    outcome: str
    """As pytest says it: "passed", "failed" or "skipped"."""
    why: str = ""

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @property
    def verdict(self) -> str:
        """ "passed"; "attributes", "refused", "not asked" and "otherwise" for reasons that are said; else "FAILED"."""
        if self.outcome == "passed":
            return "passed"
        if self.outcome == "skipped":
            return "not asked"
        if self.why.startswith(READS):
            return "attributes"
        if self.why.startswith(REFUSED):
            return "refused"
        return "otherwise" if self.function in EXCUSED else "FAILED"

    @property
    def reason(self) -> str:
        said = EXCUSED.get(self.function, "") if self.verdict != "passed" else ""
        return "; ".join(part for part in (self.why, said) if part)


def count(cases: list[Case]) -> str:
    """How many cases there are of each verdict."""
    found = Counter(case.verdict for case in cases)
    return f"{len(cases)} run: " + ", ".join(f"{number} {verdict}" for verdict, number in found.most_common())


def missed(cases: list[Case]) -> list[str]:
    """The names of cases that failed for no reason that is said here."""
    return [case.name for case in cases if case.verdict == "FAILED"]


def table(cases: list[Case]) -> str:
    """A table in markdown, one line per case."""
    lines = ["| Case | Verdict | Why |", "| --- | --- | --- |"]
    for case in cases:
        reason = " ".join(case.reason.split()).replace("|", "\\|")
        lines.append(f"| `{case.name}` | {case.verdict} | {reason} |")
    return "\n".join(lines)

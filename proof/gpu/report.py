"""The report: a line for each part, for each figure that expected.md names, and for everything else that was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .parts import Figure, Part
from .readings import Reading

__all__ = ["PartReport", "Report"]


@dataclass
class PartReport:
    part: Part
    took_s: float | None
    """None: it has not run."""
    problem: str
    """Empty: it has passed."""
    readings: Mapping[str, Reading] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.problem and all(reading.is_good for _, reading in self.figures())

    def figures(self) -> Iterator[tuple[Figure, Reading]]:
        for figure in self.part.figures:
            missing = Reading(self.problem or "not in its output", is_missing=True)
            yield figure, self.readings.get(figure.source, missing)

    def others(self) -> Iterator[tuple[str, Reading]]:
        """What the part has found besides the figures that expected.md names."""
        named = {figure.source for figure in self.part.figures}
        return ((name, reading) for name, reading in self.readings.items() if name not in named)

    def line(self) -> str:
        """One line for the console."""
        took = "" if self.took_s is None else f" in {self.took_s:.0f} s"
        return f"{self.part.name}: {self.problem or 'passed'}{took}"


@dataclass
class Report:
    about: str
    parts: list[PartReport]
    environment: Mapping[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        figures = [self._figure(*pair) for part in self.parts for pair in part.figures()]
        others = [_row(part.part.name, *self._found(*pair)) for part in self.parts for pair in part.others()]
        return "\n".join(
            [
                "# On a device", "", self.about, "",
                *_table("Part | How it went | Took", [self._part(part) for part in self.parts]),
                *_table("Figure | Means | Found | Wanted | Verdict", figures),
                *(_table("Part | Also found | Value | Verdict", others) if others else ()),
                *(_table("Environment | Value", [_row(*pair) for pair in self.environment.items()])
                  if self.environment else ()),
            ]
        )  # fmt: skip

    def _part(self, found: PartReport) -> str:
        took = "" if found.took_s is None else f"{found.took_s:.0f} s"
        return _row(found.part.name, found.problem or "passed", took)

    def _figure(self, figure: Figure, reading: Reading) -> str:
        return _row(f"`{figure.name}`", figure.about, reading.text, reading.wanted, reading.verdict)

    def _found(self, name: str, reading: Reading) -> tuple[str, str, str]:
        return name, reading.text, reading.verdict


def _table(heading: str, rows: list[str]) -> list[str]:
    cells = heading.split(" | ")
    return [_row(*cells), "|" + "---|" * len(cells), *rows, ""]


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

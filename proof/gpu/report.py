"""The report: a line for each part, and one for each figure that docs/cuda.md names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .parts import Figure, Part
from .readings import Reading

__all__ = ["PartReport", "Report"]


@dataclass
class PartReport:
    part: Part
    took_s: float | None = None
    """None: it has not run."""
    problem: str = "its turn has not come"
    readings: Mapping[str, Reading] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.problem and all(reading.is_good for _, reading in self.figures())

    def figures(self) -> Iterator[tuple[Figure, Reading]]:
        for figure in self.part.figures:
            missing = Reading(self.problem or "not in its output", is_missing=True)
            yield figure, self.readings.get(figure.source, missing)

    def line(self) -> str:
        """One line for the console."""
        took = "" if self.took_s is None else f" in {self.took_s:.0f} s"
        return f"{self.part.name}: {self.problem or 'passed'}{took}"


@dataclass
class Report:
    about: str
    parts: list[PartReport]

    @property
    def is_good(self) -> bool:
        """Every part has run, and every figure meets its target."""
        return all(part.is_good for part in self.parts)

    def write(self, file: Path) -> None:
        """Write the report to `file`, as a whole or not at all."""
        written = file.with_suffix(".new")
        written.write_text(self.markdown())
        written.replace(file)

    def markdown(self) -> str:
        figures = [self._figure(*pair) for part in self.parts for pair in part.figures()]
        return "\n".join(
            [
                "# On a device", "", self.about, "",
                "| Part | How it went | Took |", "|---|---|---|", *map(self._part, self.parts), "",
                "| Figure | Means | Found | Wanted | Verdict |", "|---|---|---|---|---|", *figures, "",
            ]
        )  # fmt: skip

    def _part(self, found: PartReport) -> str:
        took = "" if found.took_s is None else f"{found.took_s:.0f} s"
        return _row(found.part.name, found.problem or "passed", took)

    def _figure(self, figure: Figure, reading: Reading) -> str:
        return _row(f"`{figure.name}`", figure.about, reading.text, reading.wanted, reading.verdict)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

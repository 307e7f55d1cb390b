"""A cost of an attack: a row of the table, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["HEAD", "Figure", "line", "table"]

HEAD = ("Finding", "Attack", "Measured", "Value", "Limit", "Verdict")
WIDTHS = (7, 52, 46, 12, 12, 7)


@dataclass(frozen=True)
class Figure:
    """`limit` is the most that `value` may be, or, with `is_least`, the least."""

    finding: str
    attack: str
    measured: str
    value: float
    limit: float
    unit: str = ""
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def cells(self) -> tuple[str, ...]:
        sign = ">=" if self.is_least else "<="
        return (
            self.finding, self.attack, self.measured, _with_unit(self.value, self.unit),
            f"{sign} {_with_unit(self.limit, self.unit)}", "met" if self.is_met else "MISSED",
        )  # fmt: skip


def line(cells: Iterable[str]) -> str:
    """One line of the table as it is printed."""
    return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def table(figures: Iterable[Figure]) -> str:
    """All of them in markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *(figure.cells() for figure in figures)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def _with_unit(value: float, unit: str) -> str:
    if math.isinf(value):
        return "never"
    text = f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2g}"
    return f"{text} {unit}".rstrip()

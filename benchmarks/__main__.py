"""Run every benchmark and print one table: `python -m benchmarks`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BENCHMARKS = ("cycle", "copy")
"""Modules of this package. Each has `run()`, which returns rows with these keys."""
KEYS = ("name", "value", "unit", "limit", "ratio")


def collect(names: Iterable[str]) -> list[Mapping[str, Any]]:
    """The rows of every benchmark in `names`, in order; leaves with a message where one is missing."""
    rows: list[Mapping[str, Any]] = []
    for name in names:
        module = f"{__package__}.{name}"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise SystemExit(f"benchmarks: there is no {module}, so there is nothing to run for {name!r}") from None
        for row in found.run():
            missing = [key for key in KEYS if key not in row]
            if missing:
                raise SystemExit(f"benchmarks: a row of {module} lacks {', '.join(missing)}: {dict(row)}")
            rows.append(row)
    return rows


def as_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per row: names to the left, figures to the right."""
    cells = [KEYS, *(tuple(_cell(row[key]) for key in KEYS) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(KEYS))]
    return "\n".join(_line(line, widths) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = zip(cells, "<><>>", widths, strict=True)
    return "  ".join(f"{cell:{side}{width}}" for cell, side, width in padded)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    print("running " + " and ".join(BENCHMARKS) + " ...", file=sys.stderr)
    print(as_table(collect(BENCHMARKS)))

"""A table in plain text: the first columns flush left, the others flush right."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["text_table"]


def text_table(rows: Sequence[Sequence[str]], first_left: int = 1) -> list[str]:
    """Lines; the first `first_left` columns are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths, first_left)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int], first_left: int) -> list[str]:
    return [
        cell.ljust(width) if at < first_left else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]

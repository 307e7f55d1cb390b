"""Lines of a report, each with its target beside it, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

__all__ = ["Line", "at_least", "table"]


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

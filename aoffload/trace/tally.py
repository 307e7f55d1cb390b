"""Counts by name, for names from a log: a bounded number of names, and the rest together."""

from __future__ import annotations

import attrs

__all__ = ["OTHERS", "Tally"]

MAX_NAMES = 1_000
MAX_LENGTH = 200
OTHERS = "(others)"


@attrs.define(eq=False)
class Tally:
    _counts: dict[str, int] = attrs.field(factory=dict)

    def add(self, name: str, count: int = 1) -> None:
        name = name[:MAX_LENGTH]
        if name not in self._counts and len(self._counts) >= MAX_NAMES:
            name = OTHERS
        self._counts[name] = self._counts.get(name, 0) + count

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def highest_first(self) -> list[tuple[str, int]]:
        """Names and counts; equal counts by name."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))

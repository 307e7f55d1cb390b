"""Intervals of units: what several ranges have in common with one, and what they leave of it."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["within", "without"]


def within(ranges: Iterable[range], start: int, stop: int) -> list[range]:
    """What of `ranges` lies in `[start, stop)`."""
    cut = (range(max(units.start, start), min(units.stop, stop)) for units in ranges)
    return [units for units in cut if units]


def without(ranges: Iterable[range], start: int, stop: int) -> list[range]:
    """What of `[start, stop)` lies in none of `ranges`."""
    found: list[range] = []
    for units in sorted(filter(None, ranges), key=lambda units: units.start):
        if units.start > start:
            found.append(range(start, min(units.start, stop)))
        start = max(start, units.stop)
    found.append(range(start, stop))
    return [units for units in found if units]

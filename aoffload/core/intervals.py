"""Intervals of units: intersection and difference of several ranges and one."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["outside", "within", "without"]


def within(ranges: Iterable[range], start: int, stop: int) -> list[range]:
    """`ranges`, clipped to `[start, stop)`; empty ones are dropped."""
    cut = (range(max(units.start, start), min(units.stop, stop)) for units in ranges)
    return [units for units in cut if units]


def without(ranges: Iterable[range], start: int, stop: int) -> list[range]:
    """`[start, stop)` without `ranges`, as non-empty ranges."""
    found: list[range] = []
    for units in sorted(filter(None, ranges), key=lambda units: units.start):
        if units.start > start:
            found.append(range(start, min(units.start, stop)))
        start = max(start, units.stop)
    found.append(range(start, stop))
    return [units for units in found if units]


def outside(first: int, last: int, start: int, stop: int) -> list[range]:
    """What of `[start, stop)` lies outside of `[first, last)`, which may be empty."""
    if first >= last or last <= start or stop <= first:
        return [range(start, stop)] if start < stop else []
    found = [range(start, first)] if start < first else []
    if last < stop:
        found.append(range(last, stop))
    return found

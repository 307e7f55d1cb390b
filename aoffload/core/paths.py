"""Stretches of a path: ranges of units by run, and the blocks of a tier there."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from .hops import Tier
from .records import Run

__all__ = ["Stretch", "held_ids", "stretches"]


Stretch: TypeAlias = tuple[Run, int, int]
"""`(run, start, stop)`: units `[start, stop)` of one run."""


def stretches(run: Run | None, start: int, stop: int) -> list[Stretch]:
    """Units `[start, stop)` of the path of `run`, by runs, in prefix order."""
    if start >= stop:
        return []
    if run is not None and run.start <= start and stop <= run.stop:  # as most do
        return [(run, start, stop)]
    found: list[Stretch] = []
    while run is not None and run.stop > start:
        if run.start < stop:
            first, last = run.start, run.stop
            found.append((run, first if first > start else start, last if last < stop else stop))
        run = run.before
    found.reverse()
    return found


def held_ids(run: Run | None, tier: Tier, band: int, start: int, stop: int) -> array[int]:
    """The block ids of units `[start, stop)` of the path of `run`, all of which `tier` holds in `band`."""
    if run is not None and run.start <= start < stop <= run.stop:  # as most are
        part = run.part(tier, band)
        return part.blocks[(start - part.first) * part.width : (stop - part.first) * part.width]
    ids = array("i")
    for over, first, last in stretches(run, start, stop):
        part = over.parts[band * over.num_tiers + tier]
        ids.extend(part.blocks[(first - part.first) * part.width : (last - part.first) * part.width])
    return ids

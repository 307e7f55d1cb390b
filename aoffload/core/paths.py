"""Stretches of a path: ranges of units by run, and the blocks of a tier there."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from .plan import Tier
from .records import Run

__all__ = ["Stretch", "held_ids", "stretches"]


class Stretch(NamedTuple):
    """Units `[start, stop)` of one run."""

    run: Run
    start: int
    stop: int


def stretches(run: Run | None, start: int, stop: int) -> list[Stretch]:
    """Units `[start, stop)` of the path of `run`, by runs, in prefix order."""
    if start >= stop:
        return []
    if run is not None and run.start <= start and stop <= run.stop:  # as most do
        return [Stretch(run, start, stop)]
    found: list[Stretch] = []
    while run is not None and run.stop > start:
        if run.start < stop:
            first, last = run.start, run.stop
            found.append(Stretch(run, first if first > start else start, last if last < stop else stop))
        run = run.before
    found.reverse()
    return found


def held_ids(run: Run | None, tier: Tier, band: int, start: int, stop: int) -> array[int]:
    """The block ids of units `[start, stop)` of the path of `run`, all of which `tier` holds in `band`."""
    if run is not None and run.start <= start < stop <= run.stop:  # as most are
        part = run.part(tier, band) if band else run.parts[tier]
        return part.blocks[(start - part.first) * part.width : (stop - part.first) * part.width]
    ids = array("i")
    for over, first, last in stretches(run, start, stop):
        ids.extend(over.part(tier, band).ids(first, last))
    return ids

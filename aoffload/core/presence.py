"""Presence: which units of a path a tier holds, and which are on their way there. Asked here alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from .groups import Band, Layout
from .paths import Stretch
from .plan import Tier
from .records import Job, Part, Run

__all__ = ["accepted", "coming", "held_stop", "incoming", "present_stop"]


def present_stop(path: Sequence[Run], tier: Tier, start: int, stop: int) -> int:
    """Up to where `tier` holds every unit of the spine from `start` on, at most `stop`."""
    first = start
    for run in path:
        if run.stop > start:
            reached = run.parts[tier].stop
            if run.start >= stop or reached <= start:
                break
            start = reached
            if start < run.stop:
                break
    return min(start, stop) if start > first else first


def held_stop(
    layout: Layout, path: Sequence[Run], tier: Tier, start: int, stop: int, alignment: int = 1, given: int = 0
) -> int:
    """Up to where `tier` alone holds what computing there needs of every band, from unit `start` on and at most up to
    `stop`. `alignment` and `given`: see `accepted`."""
    if layout.full.width:
        stop = present_stop(path, tier, start, stop)
    if layout.windows or alignment > 1:
        stop = accepted(layout, path, stop, (tier,), alignment, given=given)
    return stop


def accepted(
    layout: Layout,
    path: Sequence[Run],
    stop: int,
    tiers: Sequence[Tier],
    alignment: int = 1,
    device_limit: int | None = None,
    given: int = 0,
) -> int:
    """The last position, at most `stop` and a multiple of `alignment`, for which `tiers` hold what every band of
    limited reach needs. `path`: runs in prefix order, the spine being there up to `stop`. The device counts up to
    `device_limit`; what lies before `given` is there, whoever holds it."""
    stop -= stop % alignment
    if not layout.windows:
        return stop
    held = _Held(path, tiers, stop if device_limit is None else device_limit, given)
    while True:
        stop -= stop % alignment
        lower = stop
        for band in layout.windows:
            lower = held.accepted(band, lower)
        if lower == stop:
            return stop
        stop = lower


@attrs.frozen
class _Held:
    """What lies where on a path, of bands of limited reach."""

    path: Sequence[Run]
    tiers: Sequence[Tier]
    device_limit: int
    given: int

    def accepted(self, band: Band, stop: int) -> int:
        """The last position, at most `stop`, for which all is there that `band` needs.

        Kinds never reach further back for a later position, so whoever lacks a unit can't end anywhere behind it that
        needs it: the next candidate is where something lies, or where nothing is needed."""
        while stop > self.given:
            missing = self._last_missing(band, max(self.given, band.first_needed(stop * band.unit_tokens)), stop)
            if missing is None:
                return stop
            stop = max(self._present_before(band, missing), band.free_unit(missing))
        return stop

    def _last_missing(self, band: Band, start: int, stop: int) -> int | None:
        """The last unit of `[start, stop)` that no tier holds."""
        for run in reversed(self.path):
            while start < stop and run.start < stop:
                firsts = [units.start for units in self._units(band, run) if units.start < stop <= units.stop]
                if not firsts:
                    return stop - 1
                stop = min(firsts)
        return None if stop <= start else stop - 1

    def _present_before(self, band: Band, position: int) -> int:
        """The end of what some tier holds, nearest to `position` from before; 0 if nothing is there."""
        for run in reversed(self.path):
            if run.start < position:
                ends = [min(units.stop, position) for units in self._units(band, run) if units.start < position]
                if ends:
                    return max(ends)
        return 0

    def _units(self, band: Band, run: Run) -> list[range]:
        found: list[range] = []
        for tier in self.tiers:
            part = run.part(tier, band.number)
            stop = min(part.stop, self.device_limit) if tier is Tier.DEVICE else part.stop
            if part.first < stop:
                found.append(range(part.first, stop))
        return found


def incoming(over: list[Stretch], start: int) -> tuple[list[Job], int]:
    """The unsettled jobs that bring the units from `start` on, without a gap, and up to where they do.

    Not up to where the jobs end: that may be on another branch.
    """
    found: dict[Job, None] = {}
    position = start
    for stretch in over:
        if stretch.stop <= position:
            continue
        part = stretch.run.parts[Tier.DEVICE]
        chain: list[Job] = []
        job = part.incoming
        while job is not None and not job.is_settled and job.stop > start:
            chain.append(job)
            job = job.predecessor
        if not chain or chain[-1].start > position:  # what was to come first never will: the rest will not be entered
            break
        found.update(dict.fromkeys(chain))
        position = min(chain[0].stop, stretch.stop)
        if position < stretch.stop:
            break
    return list(found), position


def coming(part: Part) -> Iterator[Job]:
    """The unsettled jobs that bring something to a part."""
    job = part.incoming
    while job is not None and not job.is_settled and job.stop > part.run.start:
        yield job
        job = job.predecessor

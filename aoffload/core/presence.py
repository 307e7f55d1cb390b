"""Presence: which units of a path a tier holds, and which jobs bring more of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .groups import Band, Layout
from .hops import Tier
from .paths import Stretch
from .records import Job, Part, Run

__all__ = ["accepted", "covered", "covered_stop", "held_stop", "jobs_bringing", "jobs_into", "present_stop"]


def present_stop(path: Sequence[Run], tier: Tier, start: int, stop: int) -> int:
    """End of the units from `start` on, at most `stop`, that `tier` holds without a gap, in full attention; `start` if
    it holds none there."""
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
    """The last unit, at most `stop`, at which a request could go on computing with the blocks of `tier` alone. Checks
    every band, but full attention only from unit `start` on. `alignment` and `given`: see `accepted`."""
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
    """The last position, at most `stop` and a multiple of `alignment`, for which `tiers` hold what every window needs.

    `path` is in prefix order; the caller has found full attention to be present up to `stop`. Of the device, only units
    before `device_limit` count (None: all). Units before `given` count as present."""
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


@dataclass(slots=True, frozen=True)
class _Held:
    """The window blocks that `tiers` hold on a path."""

    path: Sequence[Run]
    tiers: Sequence[Tier]
    device_limit: int
    given: int

    def accepted(self, band: Band, stop: int) -> int:
        """The last position, at most `stop`, for which everything that `band` needs is present.

        A later position never reads further back. So if a missing unit is needed at `stop`, it is needed at every
        position between the unit and `stop`. The next candidate lies before the missing unit: the last end of held
        units, or the last position at which the band needs nothing (`Band.free_unit`), whichever is later."""
        while stop > self.given:
            missing = self._last_missing(band, max(self.given, band.first_unit(stop)), stop)
            if missing is None:
                return stop
            stop = max(self._present_before(band, missing), band.free_unit(missing))
        return stop

    def _last_missing(self, band: Band, start: int, stop: int) -> int | None:
        """The last unit of `[start, stop)` that none of `tiers` holds. `stop` moves back over the held units."""
        for run in reversed(self.path):
            place = band.number * run.num_tiers
            while start < stop and run.start < stop:
                first = stop
                for tier in self.tiers:
                    part = run.parts[place + tier]
                    is_held = part.first < stop <= part.stop and (tier is not Tier.DEVICE or stop <= self.device_limit)
                    if is_held and part.first < first:
                        first = part.first
                if first == stop:
                    return stop - 1
                stop = first
        return None if stop <= start else stop - 1

    def _present_before(self, band: Band, position: int) -> int:
        """The last end of held units at or before `position`; 0 if there is none."""
        for run in reversed(self.path):
            if run.start < position:
                ends = [min(units.stop, position) for units in self._units(band, run) if units.start < position]
                if ends:
                    return max(ends)
        return 0

    def _units(self, band: Band, run: Run) -> list[range]:
        """The units of `run` that each of `tiers` holds of `band`; nothing for a tier that holds none."""
        found: list[range] = []
        for tier in self.tiers:
            part = run.part(tier, band.number)
            stop = min(part.stop, self.device_limit) if tier is Tier.DEVICE else part.stop
            if part.first < stop:
                found.append(range(part.first, stop))
        return found


def jobs_bringing(over: list[Stretch], tier: Tier, start: int) -> tuple[list[Job], int]:
    """The unsettled jobs that bring full attention of the stretches `over` to `tier`, from unit `start` on without
    a gap, and the end of these units. A job may bring more units behind that end, on another branch.
    """
    found: dict[Job, None] = {}
    position = start
    for run, _, stop in over:
        if stop <= position:
            continue
        part = run.parts[tier]
        chain: list[Job] = []
        job = part.incoming
        while job is not None and not job.is_settled and job.stop > start:
            chain.append(job)
            job = job.predecessor
        if not chain or chain[-1].start > position:  # a gap before these jobs: they will publish nothing
            break
        found.update(dict.fromkeys(chain))
        position = min(chain[0].stop, stop)
        if position < stop:
            break
    return list(found), position


def jobs_into(part: Part) -> Iterator[Job]:
    """The unsettled jobs that add to `part`, the one planned last first."""
    job = part.incoming
    while job is not None and not job.is_settled and job.stop > part.run.start:
        yield job
        job = job.predecessor


def covered(part: Part) -> tuple[int, int]:
    """(first, stop) of the units that the tier holds of the run or that jobs in flight will add; equal if none."""
    if part.incoming is None:
        return part.first, part.stop
    run = part.run
    first, stop = (part.first, part.stop) if part.blocks else (run.stop, run.start)
    for job in jobs_into(part):  # the one planned last may bring the front of a window
        first, stop = min(first, max(run.start, job.start)), max(stop, min(job.stop, run.stop))
    return first, stop


def covered_stop(part: Part) -> int:
    """The same stop of full attention, without a walk along the jobs: the one planned last reaches furthest."""
    return part.stop if part.incoming is None else max(part.stop, min(part.incoming.stop, part.run.stop))

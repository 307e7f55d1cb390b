"""The match: how much of a prompt is cached, and in which tier, in one pass over the index."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .groups import Band, Layout
from .index import RunIndex
from .plan import EVERY_TIER, NUM_TIERS, Tier
from .records import Run
from .tokens import TokenSequence

__all__ = ["Hit", "accepted", "find_hit", "find_hit_behind", "present_stop"]


@attrs.frozen
class Hit:
    """Positions are in units. `path` holds the runs up to the last position that any tier holds of the spine."""

    device_stop: int
    """Up to where computing could go on with what is on the device alone."""
    stop: int
    path: tuple[Run, ...]

    def run_at(self, position: int) -> Run:
        """The run that holds the unit before `position`."""
        for run in reversed(self.path):
            if run.start < position:
                return run
        raise ValueError(f"no run of the hit lies before unit {position}")


def find_hit(
    index: RunIndex,
    sequence: TokenSequence,
    layout: Layout,
    limit: int,
    alignment: int = 1,
    *,
    islands: bool = True,
) -> Hit:
    """Look for the first `limit` units of `sequence`, a multiple of `alignment`. Takes nothing, never splits.

    The device counts as long as it holds everything from the start: an island behind its first missing block is not
    shared. Behind that, each position has to be in a lower tier. A hit ends where every band has what it needs.
    Without `islands`, what the device holds behind where it alone could go on counts for no band.
    """
    path, device_stop, stop = _spine(index, sequence, layout, limit)
    if not layout.windows:
        stop -= stop % alignment
        return Hit(min(device_stop, stop), stop, path)
    if islands:
        stop = accepted(layout, path, stop, EVERY_TIER, alignment)
        return Hit(accepted(layout, path, min(device_stop, stop), (Tier.DEVICE,)), stop, path)
    near = device_stop
    while True:
        near = accepted(layout, path, near, (Tier.DEVICE,))
        reached = present_stop(path, Tier.HOST, near, stop) if layout.spine.width else stop
        reached = accepted(layout, path, reached, EVERY_TIER, alignment, device_limit=near)
        if near <= reached:
            return Hit(near, reached, path)
        near = reached


def find_hit_behind(
    index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int, start: int, alignment: int = 1
) -> Hit:
    """What the host holds of the first `limit` units behind `start`, up to where an engine has all it needs on a device
    that is not ours to look at."""
    path: list[Run] = []
    stop = start
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        stop = agreed
    if layout.spine.width:
        stop = present_stop(path, Tier.HOST, start, stop)
    stop = accepted(layout, path, stop, (Tier.HOST,), alignment, given=start)
    return Hit(start, max(start, stop), tuple(path))


def _spine(index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int) -> tuple[tuple[Run, ...], int, int]:
    """The path, up to where the device holds the spine, and up to where any tier does."""
    device_stop = stop = 0
    path: list[Run] = []
    has_spine = layout.spine.width > 0
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        stop = agreed
        if has_spine:
            reached = run.start
            for part in run.parts[1:NUM_TIERS]:
                if part.stop > reached:
                    reached = part.stop
            if device_stop == run.start:
                device_stop = min(run.parts[0].stop, agreed)
                reached = max(reached, device_stop)
            stop = min(reached, agreed)
        elif device_stop == run.start:
            device_stop = agreed
        if stop < run.stop:
            break
    return tuple(path), device_stop, stop


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

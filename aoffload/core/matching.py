"""The match: how much of a prompt is cached, and in which tier, in one pass over the index."""

from __future__ import annotations

import attrs

from .groups import Layout
from .index import RunIndex
from .plan import EVERY_TIER, Tier
from .presence import accepted, held_stop, present_stop
from .records import Run
from .tokens import TokenSequence

__all__ = ["Hit", "find_hit", "find_hit_behind"]


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
    path, device_stop, stop = _full_path(index, sequence, layout, limit)
    if not layout.windows:
        stop -= stop % alignment
        return Hit(min(device_stop, stop), stop, path)
    if islands:
        stop = accepted(layout, path, stop, EVERY_TIER, alignment)
        return Hit(accepted(layout, path, min(device_stop, stop), (Tier.DEVICE,)), stop, path)
    near = device_stop
    while True:
        near = accepted(layout, path, near, (Tier.DEVICE,))
        reached = present_stop(path, Tier.HOST, near, stop) if layout.full.width else stop
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
    stop = held_stop(layout, path, Tier.HOST, start, stop, alignment, given=start)
    return Hit(start, max(start, stop), tuple(path))


def _full_path(
    index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int
) -> tuple[tuple[Run, ...], int, int]:
    """The path, up to where the device holds the spine, and up to where any tier does."""
    device_stop = stop = 0
    path: list[Run] = []
    has_full = layout.full.width > 0
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        stop = agreed
        if has_full:
            reached = run.start
            for part in run.parts[1 : len(Tier)]:
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

"""The match: how much of a prompt is cached, and in which tier, in one pass over the index."""

from __future__ import annotations

import attrs

from .groups import Layout
from .index import RunIndex
from .plan import EVERY_TIER, NUM_TIERS, Tier
from .presence import accepted, held_stop, present_stop
from .records import Run
from .tokens import TokenSequence

__all__ = ["Hit", "find_hit", "find_hit_behind"]


@attrs.frozen
class Hit:
    """The result of a match, in units. `path`: the runs up to the last unit of full attention that any tier holds."""

    device_stop: int
    """The last position at which computing could continue with the device alone."""
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
    """Match at most `limit` units of `sequence`; the hit ends at a multiple of `alignment`. Pins and splits nothing.

    Full attention: the device counts up to its first missing block; every unit behind it must be in a lower tier. The
    hit ends where every window has what it needs, in either tier. Without `islands`, no device block behind the device
    hit counts for any band.
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
    """Match units `[start, limit)` in host memory. The engine has what is needed before `start` on its own device,
    which is not in the index. The hit ends at a multiple of `alignment`."""
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
    """The path, and the ends of full attention on the device and in any tier; without it, the path's end for both."""
    device_stop = stop = 0
    path: list[Run] = []
    has_full = layout.full.width > 0
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        stop = agreed
        if has_full:
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

"""The match: how much of a prompt is cached, and in which tier, in one pass over the index."""

from __future__ import annotations

from .groups import Layout
from .hops import BELOW, CACHE_TIERS, HIT_TIERS, Tier
from .index import RunIndex
from .presence import accepted, held_stop, present_stop
from .records import Run
from .tokens import TokenSequence

__all__ = ["Hit", "fetchable_path", "find_hit", "find_hit_behind"]


class Hit:
    """The result of a match, in units."""

    __slots__ = ("device_stop", "path", "stop")

    def __init__(self, device_stop: int, stop: int, path: tuple[Run, ...]) -> None:
        self.device_stop = device_stop
        """End of the device hit: the last position at which a request could go on computing with the device alone."""
        self.stop = stop
        """End of the hit, with both tiers together."""
        self.path = path
        """The matched runs in prefix order, as far as any tier holds full attention. They may reach behind `stop`."""

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

    Of full attention, the hit takes device blocks up to the first that the device lacks, and host blocks behind it. The
    hit ends at the last position at which every window band has the blocks that it needs, in either tier. Device blocks
    behind the device hit are islands; without `islands`, they count in no band.
    """
    path, device_stop, stop = _full_path(index, sequence, layout, limit)
    if not layout.windows:
        stop -= stop % alignment
        return Hit(min(device_stop, stop), stop, path)
    if islands:
        stop = accepted(layout, path, stop, HIT_TIERS, alignment)
        return Hit(accepted(layout, path, min(device_stop, stop), (Tier.DEVICE,)), stop, path)
    near = device_stop
    # The device hit ends no later than the hit, and device blocks behind the device hit do not count: shorten both in
    # turn until they agree.
    while True:
        near = accepted(layout, path, near, (Tier.DEVICE,))
        reached = present_stop(path, BELOW, near, stop) if layout.full.width else stop
        reached = accepted(layout, path, reached, HIT_TIERS, alignment, device_limit=near)
        if near <= reached:
            return Hit(near, reached, path)
        near = reached


def find_hit_behind(
    index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int, start: int, alignment: int = 1
) -> Hit:
    """Match units `[start, limit)` in host memory, for an engine that owns the device and has in its own prefix cache
    what is needed before `start`. The hit ends at a multiple of `alignment`."""
    path: list[Run] = []
    stop = start
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        stop = agreed
    stop = held_stop(layout, path, BELOW, start, stop, alignment, given=start)
    return Hit(start, max(start, stop), tuple(path))


def fetchable_path(
    index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int, alignment: int = 1
) -> tuple[list[Run], int]:
    """The path of `sequence`, and the unit, at most `limit`, up to which a fetch could make the host hold it: all that
    a hit needs there is in the host or on the disk. The host holds nothing whose front it lacks, so islands on the
    device do not count in full attention."""
    path: list[Run] = []
    stop = 0
    has_full = layout.full.width > 0
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        stop = min(max(run.parts[Tier.HOST].stop, run.parts[Tier.DISK].stop), agreed) if has_full else agreed
        if stop < run.stop:
            break
    return path, accepted(layout, path, stop, CACHE_TIERS, alignment)


def _full_path(
    index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int
) -> tuple[tuple[Run, ...], int, int]:
    """The matched path, the end of full attention on the device, and its end with both tiers together. If no group has
    full attention, both are the end of the path."""
    device_stop = stop = 0
    path: list[Run] = []
    has_full = layout.full.width > 0
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        stop = agreed
        if has_full:
            reached = run.parts[BELOW].stop
            if device_stop == run.start:
                device_stop = min(run.parts[Tier.DEVICE].stop, agreed)
                reached = max(reached, device_stop)
            stop = min(reached, agreed)
        elif device_stop == run.start:
            device_stop = agreed
        if stop < run.stop:
            break
    return tuple(path), device_stop, stop

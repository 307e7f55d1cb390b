"""The match: how much of a prompt is cached, and in which tier, in one pass over the index."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from .groups import Band, Layout
from .index import NUM_TIERS, Part, Run, RunIndex
from .plan import Tier
from .tokens import TokenSequence

__all__ = ["Answer", "Hit", "PrefixMatch", "accepted", "find_hit"]


class Answer(enum.Enum):
    HIT = "hit"
    MISS = "miss"


@attrs.frozen
class PrefixMatch:
    """How many leading tokens of a prompt are cached: on the device, and behind those in host memory."""

    num_device_tokens: int
    num_host_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_device_tokens + self.num_host_tokens

    @property
    def answer(self) -> Answer:
        return Answer.HIT if self.num_tokens else Answer.MISS


NO_MATCH = PrefixMatch(0, 0)


@attrs.frozen
class Hit:
    """Positions are in units. `path` holds the runs up to the last position that any tier holds of the spine."""

    device_stop: int
    """Up to where computing could go on with what is on the device alone."""
    stop: int
    path: tuple[Run, ...]

    def run_at(self, position: int) -> Run:
        """The run that holds the unit before `position`."""
        return next(run for run in reversed(self.path) if run.start < position)


def find_hit(index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int, alignment: int = 1) -> Hit:
    """Look for the first `limit` units of `sequence`, a multiple of `alignment`. Takes nothing, never splits.

    The device counts as long as it holds everything from the start: an island behind its first missing block is not
    shared. Behind that, each position has to be in a lower tier. A hit ends where every band has what it needs.
    """
    device_stop = stop = 0
    path: list[Run] = []
    has_spine = layout.spine.width > 0
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        reached = max(part.stop for part in run.parts[1:NUM_TIERS]) if has_spine else agreed
        if device_stop == run.start:
            device_stop = min(run.parts[Tier.DEVICE].stop, agreed) if has_spine else agreed
            reached = max(reached, device_stop)
        stop = min(reached, agreed)
        if stop < run.stop:
            break
    found = tuple(path)
    stop = accepted(layout, found, min(stop, limit), tuple(Tier), alignment)
    device_stop = min(device_stop, stop)
    if layout.windows:
        device_stop = accepted(layout, found, device_stop, (Tier.DEVICE,))
    return Hit(device_stop, stop, found)


def accepted(layout: Layout, path: Sequence[Run], stop: int, tiers: Sequence[Tier], alignment: int = 1) -> int:
    """The last position, at most `stop` and a multiple of `alignment`, for which `tiers` hold what every band of
    limited reach needs. `path`: runs in prefix order, the spine being there up to `stop`."""
    while True:
        stop -= stop % alignment
        lower = stop
        for band in layout.windows:
            lower = _accepted_by(band, path, lower, tiers)
        if lower == stop:
            return stop
        stop = lower


def _accepted_by(band: Band, path: Sequence[Run], stop: int, tiers: Sequence[Tier]) -> int:
    """The same for one band. Kinds never reach further back for a later position, so whoever lacks a unit can't end
    anywhere behind it that needs it: the next candidate is where something lies, or where nothing is needed."""
    while stop:
        missing = _last_missing(band, path, band.first_needed(stop * band.unit_tokens), stop, tiers)
        if missing is None:
            return stop
        stop = max(_present_before(band, path, missing, tiers), band.free_unit(missing))
    return 0


def _last_missing(band: Band, path: Sequence[Run], start: int, stop: int, tiers: Sequence[Tier]) -> int | None:
    """The last unit of `[start, stop)` that no tier holds."""
    for run in reversed(path):
        while start < stop and run.start < stop:
            holds = [part.first for part in _parts(band, run, tiers) if part.first < stop <= part.stop]
            if not holds:
                return stop - 1
            stop = min(holds)
    return None if stop <= start else stop - 1


def _present_before(band: Band, path: Sequence[Run], position: int, tiers: Sequence[Tier]) -> int:
    """The end of what some tier holds, nearest to `position` from before; 0 if nothing is there."""
    for run in reversed(path):
        if run.start < position:
            held = [part for part in _parts(band, run, tiers) if part.blocks and part.first < position]
            if held:
                return max(min(part.stop, position) for part in held)
    return 0


def _parts(band: Band, run: Run, tiers: Sequence[Tier]) -> list[Part]:
    return [run.part(tier, band.number) for tier in tiers]

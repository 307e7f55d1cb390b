"""The match: how much of a prompt is cached, and in which tier, in one pass over the index."""

from __future__ import annotations

import enum

import attrs

from .index import Run, RunIndex
from .plan import Tier
from .tokens import TokenSequence

__all__ = ["Answer", "Hit", "PrefixMatch", "find_hit"]


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
    """Positions are in units. `path` holds the runs up to the last position that any tier holds."""

    device_stop: int
    stop: int
    path: tuple[Run, ...]

    def narrow(self, limit: int, alignment: int) -> Hit:
        """At most `limit` units, a multiple of `alignment`."""
        stop = min(self.stop, limit)
        stop -= stop % alignment
        return attrs.evolve(self, stop=stop, device_stop=min(self.device_stop, stop))

    def run_at(self, position: int) -> Run:
        """The run that holds the unit before `position`."""
        return next(run for run in reversed(self.path) if run.start < position)


def find_hit(index: RunIndex, sequence: TokenSequence, limit: int) -> Hit:
    """Look for the first `limit` units of `sequence`. Takes nothing, never splits.

    The device counts as long as it holds everything from the start: an island behind its first missing block is not
    shared. Behind that, each position has to be in a lower tier.
    """
    device_stop = stop = 0
    path: list[Run] = []
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        reached = max(part.stop for part in run.parts[1:])
        if device_stop == run.start:
            device_stop = min(run.parts[Tier.DEVICE].stop, agreed)
            reached = max(reached, device_stop)
        stop = min(reached, agreed)
        if stop < run.stop:
            break
    return Hit(device_stop, stop, tuple(path))

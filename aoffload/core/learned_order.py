"""An eviction order that follows what brings the most hits: a ring for each class of parts, how often they were asked
for. The next to be evicted is the oldest of that ring whose oldest is worth least.

    asked for once     oldest [a][d][g][h] newest
    twice                     [b][e]                worth(class, age): see `ReturnTimes`
    3 or 4 times              [c]
    more often                [f]

A part's head is in the same class or a higher one, is as old or newer, and so is worth as much or more: a prefix loses
its tail before its head, whichever of both orders rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .eviction import LeastRecentlyUsed
from .records import Part
from .returns import NUM_CLASSES, ReturnTimes, class_of

__all__ = ["LearnedOrder", "Ruling"]


class Ruling(Protocol):
    """Says which order rules."""

    @property
    def is_learned(self) -> bool: ...


class LearnedOrder:
    """Ruled by what was learned or, as long as `ruling` says so, by the last use."""

    def __init__(self, times: ReturnTimes, ruling: Ruling) -> None:
        self._times = times
        self._ruling = ruling
        self._rings = [LeastRecentlyUsed() for _ in range(NUM_CLASSES)]
        self._last_use = 0
        self._clock = 0
        """The worths of `_heads` are those at this time. None: not known."""
        self._heads: list[Part | None] = [None] * NUM_CLASSES
        self._worths = [0.0] * NUM_CLASSES

    def asked(self, part: Part, num_uses: int) -> None:
        """The units of `part` were asked for, for the `num_uses`-th time. A class never falls: what is behind the part
        may be in it, too."""
        number = class_of(num_uses)
        if number <= part.ring:
            return
        is_linked = part.last_use and part.blocks and not part.num_references
        if is_linked:
            self._rings[part.ring].remove(part)
        part.ring = number
        if is_linked:
            self._rings[number].add_back(part)

    def add(self, part: Part) -> None:
        """Uses are numbered by the clock, as ages are; each has a number of its own."""
        clock = self._times.clock
        self._last_use = last_use = clock if clock > self._last_use else self._last_use + 1
        self._rings[part.ring].add_used(part, last_use)

    def add_newer(self, part: Part, than: Part) -> None:
        if part.ring == than.ring:
            self._rings[part.ring].add_newer(part, than)
        else:
            self._rings[part.ring].add_as_old(part, than)

    def add_back(self, part: Part) -> None:
        self._rings[part.ring].add_back(part)

    def remove(self, part: Part) -> None:
        self._rings[part.ring].remove(part)

    def oldest(self) -> Part | None:
        """What is worth least; of equal parts the one that was used first."""
        if not self._ruling.is_learned:
            return self._used_first([ring.oldest() for ring in self._rings])
        clock = self._times.clock
        if clock != self._clock:
            self._clock, self._heads = clock, [None] * NUM_CLASSES
        found, least, first = None, 0.0, 0
        for number, ring in enumerate(self._rings):
            part = ring.oldest()
            if part is None:
                continue
            if part is not self._heads[number]:
                self._heads[number] = part
                self._worths[number] = self._times.worth(number, clock - part.last_use)
            worth = self._worths[number]
            if found is None or worth < least or (worth == least and part.last_use < first):
                found, least, first = part, worth, part.last_use
        return found

    def __iter__(self) -> Iterator[Part]:
        heads = [ring.oldest() for ring in self._rings]
        while (part := self._next(heads)) is not None:
            heads[part.ring] = part.newer
            yield part

    def _next(self, heads: list[Part | None]) -> Part | None:
        if not self._ruling.is_learned:
            return self._used_first(heads)
        found = [part for part in heads if part is not None]
        return min(found, key=self._worth, default=None)

    def _worth(self, part: Part) -> tuple[float, int]:
        return self._times.worth(part.ring, self._times.clock - part.last_use), part.last_use

    @staticmethod
    def _used_first(heads: list[Part | None]) -> Part | None:
        found = None
        for part in heads:
            if part is not None and (found is None or part.last_use < found.last_use):
                found = part
        return found

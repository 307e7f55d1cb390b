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

    def asked(self, part: Part, num_uses: int) -> None:
        """The units of `part` were asked for, for the `num_uses`-th time. A class never falls: what is behind the part
        may be in it, too."""
        number = class_of(num_uses)
        if part.blocks and not part.num_references:
            self._rings[part.ring].remove(part)
            part.ring = max(part.ring, number)
            self.add(part)
        else:
            part.ring = max(part.ring, number)

    def add(self, part: Part) -> None:
        """Uses are numbered by the clock, as ages are; each has a number of its own."""
        self._last_use = max(self._last_use + 1, self._times.clock)
        self._rings[part.ring].add_used(part, self._last_use)

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
        return self._next([ring.oldest() for ring in self._rings])

    def __iter__(self) -> Iterator[Part]:
        heads = [ring.oldest() for ring in self._rings]
        while (part := self._next(heads)) is not None:
            heads[part.ring] = part.newer
            yield part

    def _next(self, heads: list[Part | None]) -> Part | None:
        """The one of `heads` that is worth least; of equal ones the one that was used first, then that of the lower
        class."""
        found, least = None, (0.0, 0)
        is_learned, times = self._ruling.is_learned, self._times
        for part in heads:
            if part is not None:
                worth = times.worth(part.ring, times.clock - part.last_use) if is_learned else 0.0
                if found is None or (worth, part.last_use) < least:
                    found, least = part, (worth, part.last_use)
        return found

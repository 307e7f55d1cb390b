"""An eviction order that follows what brings the most hits: a ring for each class of parts, how often they were asked
for. The next to be evicted is the oldest of that ring whose oldest is worth least.

    asked for once     oldest [a][d][g][h] newest
    twice                     [b][e]                worth(class, age): see `ReturnTimes`
    3 or 4 times              [c]
    more often                [f]

Below these are the same rings once more, for parts that hints spare: they go last.

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
        self._plain = tuple([LeastRecentlyUsed() for _ in range(NUM_CLASSES)])
        self._spared = tuple([LeastRecentlyUsed() for _ in range(NUM_CLASSES)])
        self._last_use = 0
        self._known = [(0, 0, 0.0) for _ in range(NUM_CLASSES)]
        """By class: of which use, at which time of the clock, the worth was computed last, and what it was."""

    def asked(self, part: Part, num_uses: int) -> None:
        """The units of `part` were asked for, for the `num_uses`-th time. A class never falls: what is behind the part
        may be in it, too."""
        more = class_of(num_uses) - part.ring % NUM_CLASSES
        if more > 0:
            self._move(part, part.ring + more)

    def hinted(self, part: Part, change: int) -> None:
        """One hint more spares `part`, or one less."""
        self._move(part, max(part.ring % NUM_CLASSES, part.ring + change * NUM_CLASSES))

    def _move(self, part: Part, ring: int) -> None:
        is_linked = bool(part.blocks) and not part.num_references
        if is_linked:
            self._ring(part).remove(part)
        part.ring = ring
        if is_linked:
            self._ring(part).add_among(part)

    def _ring(self, part: Part) -> LeastRecentlyUsed:
        """By its class. Those that hints spare are apart."""
        ring = part.ring
        return self._plain[ring] if ring < NUM_CLASSES else self._spared[ring % NUM_CLASSES]

    def add(self, part: Part) -> None:
        """Uses are numbered by the clock, as ages are; each has a number of its own."""
        clock = self._times.clock
        self._last_use = last_use = clock if clock > self._last_use else self._last_use + 1
        ring = part.ring
        (self._plain[ring] if ring < NUM_CLASSES else self._ring(part)).add_used(part, last_use)

    def add_newer(self, part: Part, than: Part) -> None:
        ring = self._ring(part)
        if ring is self._ring(than):
            ring.add_newer(part, than)
        else:
            ring.add_as_old(part, than)

    def add_back(self, part: Part) -> None:
        self._ring(part).add_back(part)

    def remove(self, part: Part) -> None:
        ring = part.ring
        (self._plain[ring] if ring < NUM_CLASSES else self._ring(part)).remove(part)

    def oldest(self) -> Part | None:
        return self._worst_of(self._plain) or self._worst_of(self._spared)

    def _worst_of(self, rings: tuple[LeastRecentlyUsed, ...]) -> Part | None:
        return self._first_of([ring.first for ring in rings])

    def _first_of(self, parts: list[Part | None]) -> Part | None:
        """Of the oldest ones by class: what is worth least or, of equal worth, the lower class. What is newer than one
        of a lower class, as a head is, is worth at least as much."""
        found: Part | None = None
        least: float | None = None
        for part in parts:
            if found is None or part is None:
                found = found or part
            elif part.last_use < found.last_use:
                if not self._ruling.is_learned:
                    found = part
                    continue
                worth, least = self._worth(part), self._worth(found) if least is None else least
                if worth < least:
                    found, least = part, worth
        return found

    def _worth(self, part: Part) -> float:
        of_class, times = part.ring % NUM_CLASSES, self._times
        last_use, clock, worth = self._known[of_class]
        if last_use != part.last_use or clock != times.clock:
            worth = times.worth(of_class, times.clock - part.last_use)
            self._known[of_class] = (part.last_use, times.clock, worth)
        return worth

    def __iter__(self) -> Iterator[Part]:
        for rings in (self._plain, self._spared):
            parts = [ring.first for ring in rings]
            while (part := self._first_of(parts)) is not None:
                parts[part.ring % NUM_CLASSES] = part.newer
                yield part

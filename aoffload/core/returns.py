"""How long prefixes stay away before they are asked for again, by how often they were asked for; and what follows from
that: which blocks bring the most hits for the room that they take.

Time is counted in units asked for. Ages fall into bins, each half as long again as all before it together:

    age    0 |....|......|.........|..............|.....................|  ...
    bin        0     1        2           3                  4
    asked for  [units that reached the bin] [of those, units that were asked for within it]      one row per class

Of a unit that has reached some age, the counts of the bins behind it say how likely it returns before any later age,
and how long it is kept until then. Its worth is the most returns per unit of time that any of these ends gives.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import inf

__all__ = ["NUM_CLASSES", "ReturnTimes", "class_of"]

NUM_CLASSES = 4
NUM_BINS = 24
GROWTH = 1.5
"""The end of a bin, by that of the one before it."""
FIRST_BIN = 32
"""The first bin is one of so many parts of the capacity."""
MERGED = 8
"""Times of which something is known are apart by about one of so many parts of their age."""
PRIOR_REQUESTS = 4.0
"""A class behaves like all of them together, until it has been seen this often in a bin."""
EVERY = 128
"""Requests between two computations of the index."""
KEPT = 0.5 ** (EVERY / 4000)
"""What counts weigh after so many requests: half of it after 4000."""
MOST = 0.999
"""Nothing is certain to return."""
AFTER_ALL = [inf]
"""Of what was asked for by some time, behind all that it may be."""

_CLASS_OF = (0, 0, 1, 2, 2)


def class_of(num_uses: int) -> int:
    """Asked for once, twice, 3 or 4 times, more often."""
    return _CLASS_OF[num_uses] if num_uses < 5 else 3


class ReturnTimes:
    """Counts returns, and computes the worth of blocks from them: `worth(class, age)`. It never rises with age, and
    never falls with the class: so a prefix, which is asked for at least as often and as late as what is behind it, is
    worth at least as much."""

    def __init__(self, capacity: int) -> None:
        first = max(1.0, capacity / FIRST_BIN)
        self.clock = 1
        """Units asked for so far, and one more: 0 is no time."""
        self.num_requests = 0
        self._ends = [first * GROWTH**number for number in range(NUM_BINS)]
        self._starts = [0.0, *self._ends[:-1]]
        self._lengths = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        self._asked = [0.0] * NUM_CLASSES
        self._returned = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._past: list[tuple[int, list[float]]] = [(0, [0.0] * NUM_CLASSES)]
        """What `_asked` was at some times, the oldest first: the longer ago, the further apart."""
        self._worth = [[1.0 / (1 + number) for number in range(NUM_BINS)] for _ in range(NUM_CLASSES)]
        """Until there is something to learn from, the order is that of the last use."""

    def worth(self, of_class: int, age: int) -> float:
        number, worth = bisect_right(self._ends, age), self._worth[of_class]
        if number + 1 >= NUM_BINS:
            return worth[-1]
        own = worth[number]
        return own + (worth[number + 1] - own) * (age - self._starts[number]) / self._lengths[number]

    # -- what is counted ------------------------------------------------------------------------------------------

    def returned(self, of_class: int, since: int, num_units: int) -> None:
        """Units that were last asked for at `since`, and were in `of_class` then, are asked for again."""
        number = bisect_right(self._ends, self.clock - since)
        if number < NUM_BINS:
            self._returned[of_class][number] += num_units

    def asked(self, by_class: list[int]) -> None:
        """A request asks for so many units, which are in these classes now. It is over with this call."""
        for of_class, num_units in enumerate(by_class):
            if num_units:
                self._asked[of_class] += num_units
                self.clock += num_units
        self.num_requests += 1
        if not self.num_requests % EVERY:
            self._compute()
            for counts in (self._asked, *self._returned):
                counts[:] = [count * KEPT for count in counts]

    # -- what follows ---------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        self._note()
        reached = self._reached()
        prior = PRIOR_REQUESTS * self.clock / self.num_requests
        all_returned = _smoothed([sum(counts) for counts in zip(*self._returned, strict=True)])
        all_reached = _smoothed([sum(counts) for counts in zip(*reached, strict=True)])
        rates = [min(MOST, one / (other + 1e-9)) for one, other in zip(all_returned, all_reached, strict=True)]
        floor = [0.0] * NUM_BINS
        for of_class in range(NUM_CLASSES):
            bins = zip(_smoothed(self._returned[of_class]), _smoothed(reached[of_class]), rates, strict=True)
            own = [min(MOST, (returned + prior * rate) / (at_risk + prior)) for returned, at_risk, rate in bins]
            floor = self._worth[of_class] = self._worth_by_bin(own, floor)

    def _note(self) -> None:
        """Add to the past what is now, and leave out of it what is close to others for its age."""
        past, clock = self._past, self.clock
        kept = past[:1]
        for at in range(1, len(past)):
            after = past[at + 1][0] if at + 1 < len(past) else clock
            if (after - kept[-1][0]) * MERGED >= clock - after:
                kept.append(past[at])
        kept.append((clock, self._asked.copy()))
        self._past = kept

    def _reached(self) -> list[list[float]]:
        """By class: the units that came into each bin. That were as many as had been asked for by then, less those that
        returned within the bins before it."""
        past = [self._asked_before(self.clock - start) for start in self._starts]
        found: list[list[float]] = []
        for all_asked, all_returned in zip(zip(*past, strict=True), self._returned, strict=True):
            left, reached = 1.0, list[float]()
            for asked, returned in zip(all_asked, all_returned, strict=True):
                came = asked * left
                reached.append(came)
                if returned and came > 0:
                    left = left * (1 - returned / came) if returned < came else 0.0
            found.append(reached)
        return found

    def _asked_before(self, time: float) -> list[float]:
        at = bisect_right(self._past, (time, AFTER_ALL))
        if not at:
            return [0.0] * NUM_CLASSES
        since, before = self._past[at - 1]
        if at == len(self._past):
            return before
        until, after = self._past[at]
        part = (time - since) / (until - since)
        return [one + (other - one) * part for one, other in zip(before, after, strict=True)]

    def _worth_by_bin(self, rates: list[float], floor: list[float]) -> list[float]:
        """`rates`: which part of the units that reach a bin return within it. At least `floor`, and falling.

        From the last bin back, each stretch is joined with the one behind it while that one is worth more: it is the
        best end to keep a block for."""
        spans: list[tuple[float, float]] = []
        kept = 1.0
        for rate, length in zip(rates, self._lengths, strict=True):
            spans.append((kept * rate, length * kept * (1 - rate / 2)))
            kept *= 1 - rate
        found: list[float] = []
        stretches: list[tuple[float, float]] = []
        for returns, held in reversed(spans):
            while stretches and stretches[-1][0] * held > returns * stretches[-1][1]:
                more, longer = stretches.pop()
                returns, held = returns + more, held + longer
            stretches.append((returns, held))
            found.append(returns / held)
        found.reverse()
        return [max(least, worth) for least, worth in zip(floor, accumulate(found, min), strict=True)]


def _smoothed(counts: list[float]) -> list[float]:
    """Of each bin and both beside it."""
    sides = zip([0.0, *counts[:-1]], counts, [*counts[1:], 0.0], strict=True)
    return [before + own + after for before, own, after in sides]

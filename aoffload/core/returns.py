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
from dataclasses import dataclass

__all__ = ["NUM_CLASSES", "ReturnTimes", "class_of"]

NUM_CLASSES = 4
NUM_BINS = 24
GROWTH = 1.5
"""The end of a bin, by that of the one before it."""
FIRST_BIN = 32
"""The first bin is one of so many parts of the capacity."""
MERGED = 4
"""Requests that came within one of so many parts of a bin are counted together there."""
PRIOR_REQUESTS = 4.0
"""A class behaves like all of them together, until it has been seen this often in a bin."""
EVERY = 64
"""Requests between two computations of the index."""
HALVED_EVERY = 4000
"""Requests after which all counts are halved: what is old weighs less."""
MOST = 0.999
"""Nothing is certain to return."""


def class_of(num_uses: int) -> int:
    """Asked for once, twice, 3 or 4 times, more often."""
    return num_uses - 1 if num_uses < 3 else 2 if num_uses < 5 else 3


@dataclass(slots=True, eq=False)
class _Asked:
    """Units that were last asked for at about the same time, and were not asked for since."""

    since: int
    left: list[int]
    """By class."""


class ReturnTimes:
    """Counts returns, and computes the worth of blocks from them: `worth(class, age)`. It never rises with age, and
    never falls with the class: so a prefix, which is asked for at least as often and as late as what is behind it, is
    worth at least as much."""

    def __init__(self, capacity: int) -> None:
        first = max(1.0, capacity / FIRST_BIN)
        self.clock = 1
        """Units asked for so far, and one more: 0 is no time."""
        self._ends = [first * GROWTH**number for number in range(NUM_BINS)]
        self._reached = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._returned = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._tick = first / MERGED
        """What is asked for within it counts as asked for at once."""
        self._latest = _Asked(self.clock, [0] * NUM_CLASSES)
        self._by_bin: list[list[_Asked]] = [[] for _ in range(NUM_BINS)]
        """In each bin, the oldest first."""
        self._by_bin[0].append(self._latest)
        self._worth = [[1.0 / (1 + number) for number in range(NUM_BINS)] for _ in range(NUM_CLASSES)]
        """Until there is something to learn from, the order is that of the last use."""
        self.num_requests = 0

    def worth(self, of_class: int, age: int) -> float:
        number, worth = bisect_right(self._ends, age), self._worth[of_class]
        if number + 1 >= NUM_BINS:
            return worth[-1]
        start, end = self._ends[number - 1] if number else 0.0, self._ends[number]
        return worth[number] + (worth[number + 1] - worth[number]) * (age - start) / (end - start)

    # -- what is counted ------------------------------------------------------------------------------------------

    def returned(self, of_class: int, since: int, num_units: int) -> None:
        """Units that were last asked for at `since`, and were in `of_class` then, are asked for again."""
        number = bisect_right(self._ends, self.clock - since)
        for place in range(number, min(number + 2, NUM_BINS)):  # one that was merged may be ahead
            found = self._find(self._by_bin[place], since)
            if found is not None and found.left[of_class] >= num_units:
                found.left[of_class] -= num_units
                self._returned[of_class][place] += num_units
                return

    @staticmethod
    def _find(asked: list[_Asked], since: int) -> _Asked | None:
        for each in reversed(asked):
            if each.since <= since:
                return each
        return None

    def asked(self, by_class: list[int]) -> None:
        """A request asks for so many units, which are in these classes now. It is over with this call."""
        latest = self._latest
        if self.clock - latest.since >= self._tick:
            latest = self._latest = _Asked(self.clock, [0] * NUM_CLASSES)
            self._by_bin[0].append(latest)
            self._age()
        for of_class, num_units in enumerate(by_class):
            if num_units:
                latest.left[of_class] += num_units
                self._reached[of_class][0] += num_units
                self.clock += num_units
        self.num_requests += 1
        if not self.num_requests % EVERY:
            self._compute()
        if not self.num_requests % HALVED_EVERY:
            for counts in (*self._reached, *self._returned):
                counts[:] = [count / 2 for count in counts]

    def _age(self) -> None:
        """Move on what has reached the end of its bin."""
        clock = self.clock
        for number, end in enumerate(self._ends):
            asked = self._by_bin[number]
            while asked and clock - asked[0].since >= end:
                first = asked.pop(0)
                if number + 1 < NUM_BINS:
                    self._enter(number + 1, first)

    def _enter(self, number: int, asked: _Asked) -> None:
        for of_class, num_units in enumerate(asked.left):
            self._reached[of_class][number] += num_units
        there = self._by_bin[number]
        if there and (asked.since - there[-1].since) * MERGED < self._ends[number] - self._ends[number - 1]:
            there[-1].left = [one + other for one, other in zip(there[-1].left, asked.left, strict=True)]
        else:
            there.append(asked)

    # -- what follows ---------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        prior = PRIOR_REQUESTS * self.clock / self.num_requests
        all_returned = _smoothed([sum(counts) for counts in zip(*self._returned, strict=True)])
        all_reached = _smoothed([sum(counts) for counts in zip(*self._reached, strict=True)])
        rates = [min(MOST, one / (other + 1e-9)) for one, other in zip(all_returned, all_reached, strict=True)]
        floor = [0.0] * NUM_BINS
        for of_class in range(NUM_CLASSES):
            returned, reached = _smoothed(self._returned[of_class]), _smoothed(self._reached[of_class])
            own = [min(MOST, (returned[at] + prior * rates[at]) / (reached[at] + prior)) for at in range(NUM_BINS)]
            floor = self._worth[of_class] = self._worth_by_bin(own, floor)

    def _worth_by_bin(self, rates: list[float], floor: list[float]) -> list[float]:
        """`rates`: which part of the units that reach a bin return within it. At least `floor`, and falling.

        From the last bin back, each stretch is joined with the one behind it while that one is worth more: it is the
        best end to keep a block for."""
        spans: list[tuple[float, float]] = []
        kept, before = 1.0, 0.0
        for rate, end in zip(rates, self._ends, strict=True):
            spans.append((kept * rate, (end - before) * kept * (1 - rate / 2)))
            kept, before = kept * (1 - rate), end
        found: list[float] = []
        stretches: list[tuple[float, float]] = []
        for returns, held in reversed(spans):
            while stretches and stretches[-1][0] * held > returns * stretches[-1][1]:
                more, longer = stretches.pop()
                returns, held = returns + more, held + longer
            stretches.append((returns, held))
            found.append(returns / held)
        found.reverse()
        least = found[0]
        for at, worth in enumerate(found):
            least = min(least, worth)
            found[at] = max(floor[at], least)
        return found


def _smoothed(counts: list[float]) -> list[float]:
    """Of each bin and both beside it."""
    return [sum(counts[max(0, at - 1) : at + 2]) for at in range(NUM_BINS)]

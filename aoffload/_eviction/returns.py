"""Return times: measures how soon prompts are requested again, and derives the worth of a block from it.

A prefix is *idle* between two requests for it, and *returns* with the next one. `ReturnTimes` puts idle prefixes in
*buckets*, by their number of requests or their hint:

- A prefix without a hint is in one of three classes, by its number of requests: one, two, more.
- A hint predicts that a prefix returns in some seconds, or never. Predictions of one bucket differ by a factor of at
  most 1.6. If the hint names a category, such as a tool, the category has buckets of its own.

For each bucket, it counts returns by the age at which they come. Ages are counted in bins. Each bin ends at 1.4 times
the age at which the bin before it ends:

    age in s     0 |......1|.1.4|..2|.2.8|...4|....5.7|......8|  ...
    counted        [tokens that reached this age] [of those, tokens that returned within the bin]   for each bucket

So the more predictions of a bucket have come true, the more its next prediction changes the order. If clients lie, the
lies change the counts of their buckets, and later predictions of these buckets change less. Prefixes that have not
returned yet count, too: they have reached all bins up to their age.

For a block of some bucket and age, the counts give two numbers for each later age: the probability that the block
returns by then, and the expected time that it takes up space until then. Its *worth* is the largest quotient of the two
over all later ages: the hits per second of one block of space, if the cache keeps the block for the best time. With a
prediction, the worth rises up to about the predicted time, and falls after it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from .status import BucketStatistics

NUM_CLASSES = 3
MAX_BUCKETS = 192
"""Buckets, the classes included."""
MAX_OF_CATEGORIES = 150
"""Once hints have this many buckets, a hint that needs a new bucket counts as a hint without a category."""
NEVER = math.inf
"""The prediction that a prompt does not return."""
PER_OCTAVE = 1.5
"""Buckets of predictions, for each doubling of the predicted time."""
MIN_PREDICTED_S, MAX_PREDICTED_S = 0.25, 2.0**22

TICKS = 1_000_000
"""Ticks of the clock in a second."""
NUM_BINS = 48
ENDS = [int(TICKS * 2 ** (number / 2)) for number in range(NUM_BINS - 1)]
"""The age in ticks at which each bin ends. The last bin has no end."""
_STARTS = [0, *ENDS]
_LENGTHS = [(end - start) / TICKS for start, end in zip(_STARTS, [*ENDS, 2 * ENDS[-1]], strict=True)]

MERGED = 8
"""The counts are recorded at times that are apart by about their age divided by this."""
PRIOR_REQUESTS = 2.0
"""Weight of the return rates of all buckets in each bin of one bucket, in requests."""
EVERY = 512
"""Requests between two computations of the worth; fewer at first."""
HALVED_AFTER = 4000
"""After this many requests, a count weighs half. Counts decay at each computation of the worth."""
MOST = 0.999
"""Upper bound on the estimated probability to return within a bin."""

Floats = NDArray[np.float64]


def class_of(num_uses: int) -> int:
    """The class by the number of requests: 0 for one, 1 for two, 2 for more."""
    return 0 if num_uses < 2 else 1 if num_uses == 2 else 2


def bin_of(age: int) -> int:
    """The bin of an age in ticks."""
    return bisect_right(ENDS, age)


def _no_clock() -> None:
    """Default of `ReturnTimes.clock_of`."""


class ReturnTimes:
    """Counts returns by bucket and age, and computes the worth of blocks from them."""

    def __init__(self) -> None:
        self.clock_of: Callable[[], Callable[[], float] | None] = _no_clock
        """Returns the clock, which counts seconds: a runtime has one once it is entered. Without a clock, the time is
        the number of units that were requested so far, and each counts as one second."""
        self.now = 1
        """The time of the last call of `advance`, in ticks. Never 0."""
        self.num_requests = 0
        self.num_computed = 0
        """Counts changes of `worth`."""
        self._num_units = 0
        self._total = 0.0
        """Units that became idle. Older ones count less."""
        self._computed_at = 0
        self._became_idle = [0.0] * MAX_BUCKETS
        """Units that became idle, by bucket."""
        self._returned = [[0.0] * NUM_BINS for _ in range(MAX_BUCKETS)]
        """Units that returned, by bucket and bin."""
        self._past: list[tuple[int, Floats]] = [(0, np.zeros(MAX_BUCKETS))]
        """Records of `_became_idle`, each with its time, the oldest first. The older the records, the larger the gaps
        between their times."""
        plain = [1.0 / (1 + number) for number in range(NUM_BINS)]
        self.worth: list[list[float]] = [plain] * MAX_BUCKETS
        """By bucket and bin. At first this gives LRU order."""
        self._numbers: dict[tuple[str, float | None], int] = {}
        """The bucket of a category and prediction."""

    # -- buckets --------------------------------------------------------------------------------------------------

    def bucket(self, category: str, in_s: float | None) -> int:
        """The bucket of a hint. `in_s`: seconds from the last use to the predicted return; None: the hint predicts no
        time."""
        step = None if in_s is None else _step_of(in_s)
        found = self._numbers.get((category, step))
        if found is None:
            if category and len(self._numbers) >= MAX_OF_CATEGORIES:
                return self.bucket("", in_s)
            self._numbers[category, step] = found = NUM_CLASSES + len(self._numbers)
            self.worth[found] = self.worth[0]
        return found

    def statistics(self, unit_tokens: int) -> Iterator[BucketStatistics]:
        """What was learned about each bucket that has seen prompts."""
        hinted = {number: key for key, number in self._numbers.items()}
        for number in range(self._num_buckets):
            asked, returned = self._became_idle[number], self._returned[number]
            if asked < 0.5:
                continue
            category, step = hinted.get(number, ("", None))
            num_returned, median, so_far = sum(returned), None, 0.0
            for length, end, count in zip(_LENGTHS, [*ENDS, 2 * ENDS[-1]], returned, strict=True):
                so_far += count
                if num_returned and so_far * 2 >= num_returned:
                    median = end / TICKS - length * (so_far - num_returned / 2) / count
                    break
            predicted = step if step is None or step == NEVER else 2 ** (step / PER_OCTAVE)
            num_requests = number + 1 if number < NUM_CLASSES else None
            yield BucketStatistics(
                category, predicted, num_requests, asked * unit_tokens, min(1.0, num_returned / asked), median
            )

    # -- counting -------------------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Read the clock. Returns the time, which never goes back. No two calls return the same time."""
        clock = self.clock_of()
        seconds = self._num_units if clock is None else clock()
        self.now = now = max(self.now + 1, int(seconds * TICKS) if math.isfinite(seconds) else 0)
        return now

    def returned(self, bucket: int, since: int, num_units: int) -> None:
        """Count units that return now. They were idle since the time `since`, and in `bucket`."""
        self._returned[bucket][bisect_right(ENDS, self.now - since)] += num_units

    def idle(self, bucket: int, num_units: int) -> None:
        """Count units that became idle just now."""
        self._became_idle[bucket] += num_units
        self._total += num_units
        self._num_units += num_units

    def moved(self, old: int, new: int, num_units: int) -> None:
        """Count idle units in another bucket, because of a hint about them."""
        self._became_idle[old] = max(0.0, self._became_idle[old] - num_units)  # those counts may count less by now
        self._became_idle[new] += num_units

    def counted(self) -> None:
        """The units of one request were counted."""
        self.num_requests += 1
        num_since = self.num_requests - self._computed_at
        if num_since < EVERY and num_since * 8 < self.num_requests:
            return
        self._compute()
        self._computed_at = self.num_requests
        kept = 0.5 ** (num_since / HALVED_AFTER)
        self._total *= kept
        for asked in (asked for _, asked in self._past):
            asked *= kept
        for counts in (self._became_idle, *self._returned[: self._num_buckets]):
            counts[:] = [count * kept for count in counts]

    @property
    def _num_buckets(self) -> int:
        return NUM_CLASSES + len(self._numbers)

    # -- the worth ------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        self._note()
        num_buckets = self._num_buckets
        returned = np.array(self._returned[:num_buckets])
        reached = self._reached(returned)
        num_requests = min(self.num_requests, HALVED_AFTER / math.log(2))
        prior = PRIOR_REQUESTS * self._total / max(1.0, num_requests)
        of_all = np.minimum(MOST, returned.sum(0) / (reached.sum(0) + 1e-9))
        rates = np.minimum(MOST, (returned + prior * of_all) / (reached + prior + 1e-9))
        for bucket in range(num_buckets):
            self.worth[bucket] = _worth_by_bin(rates[bucket].tolist())
        self.num_computed += 1

    def _note(self) -> None:
        """Record `_became_idle`, and drop older records whose times are too close together for their age."""
        past, now = self._past, self.now
        kept = past[:1]
        for at in range(1, len(past)):
            after = past[at + 1][0] if at + 1 < len(past) else now
            if (after - kept[-1][0]) * MERGED >= now - after:
                kept.append(past[at])
        if kept[-1][0] == now:
            kept.pop()
        kept.append((now, np.array(self._became_idle)))
        self._past = kept

    def _reached(self, all_returned: Floats) -> Floats:
        """By bucket and bin, the number of units that have reached the bin: the units that became idle long enough ago,
        without those that returned in an earlier bin."""
        times = np.array([time for time, _ in self._past], np.float64)
        num_buckets = len(all_returned)
        counts = np.array([asked[:num_buckets] for _, asked in self._past])
        at = np.maximum(self.now - np.array(_STARTS, np.float64), 0.0)
        after = np.clip(np.searchsorted(times, at, side="right"), 1, len(times) - 1) if len(times) > 1 else None
        if after is None:
            asked = np.repeat(counts, NUM_BINS, axis=0)
        else:
            since, until = times[after - 1], times[after]
            part = np.clip((at - since) / (until - since), 0.0, 1.0)[:, None]
            asked = counts[after - 1] * (1 - part) + counts[after] * part
        reached = np.zeros_like(all_returned)
        left = np.ones(num_buckets)
        for number in range(NUM_BINS):
            came = np.maximum(asked[number], 0.0) * left
            reached[:, number] = came
            came_back = np.divide(all_returned[:, number], came, out=np.zeros(num_buckets), where=came > 0)
            left = left * (1 - came_back.clip(0.0, 1.0))
        return reached


def _step_of(in_s: float) -> float:
    """The predicted time as a number of steps on a logarithmic scale, `PER_OCTAVE` for each doubling. Times of one step
    share a bucket. `NEVER` stays `NEVER`."""
    if in_s == NEVER:
        return NEVER
    return float(round(PER_OCTAVE * math.log2(min(max(in_s, MIN_PREDICTED_S), MAX_PREDICTED_S))))


def _worth_by_bin(rates: list[float]) -> list[float]:
    """The worth in each bin. `rates`: for each bin, the share that returns within it, of the units that
    reach it.

    Goes from the last bin to the first. Joins a bin with the stretch of bins after it, as long as that stretch is worth
    more per second. The cache should keep a block until the end of the joined stretch."""
    spans: list[tuple[float, float]] = []
    kept = 1.0
    for rate, length in zip(rates, _LENGTHS, strict=True):
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
    return found

"""Learned eviction: evict the blocks that will bring the fewest hits for the space that they take.

**What is learned** (`ReturnTimes`). How long prefixes stay away before they return, by how often they were requested.
Time is counted in requested units. Ages fall into bins, each half as long again as all bins before it together:

    age      0 |....|......|.........|..............|.....................|  ...
    bin          0     1        2           3                  4
    counted    [units that reached the bin] [of those, units that returned within it]      one row per class

For a unit of some age, the counts of the later bins give the chance that it returns before any later age, and the time
for which it is kept until then. Its worth is the largest number of returns per unit of time over all these ends.

**The order** (`LearnedOrder`). One list for each class of parts, by how often they were requested. The next part to be
evicted is the oldest of that list whose oldest is worth least:

    requested once     oldest [a][d][g][h] newest
    twice                     [b][e]                worth(class, age): see `ReturnTimes`
    3 or 4 times              [c]
    more often                [f]

Below these are the same lists once more, for parts that hints spare: they are evicted last. A part's head is in the
same class or a higher one, and as old or newer. So it is worth as much or more, and a prefix loses its tail before its
head.

**The guard** (`Guard`). Learning may be wrong. So two small caches beside the real one see the same requests and hold a
sample, one unit in `SAMPLED`, in the same part of the capacity. One evicts by what was learned, the other by the last
use. The order whose cache hits more decides in the real cache. `Rulings` reports when that changes, and counts the
evictions of each order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from .._kernel.cache import PrefixCache
from .._kernel.layout import Layout
from .._kernel.moves import Moves
from .._kernel.pools import LeastRecentlyUsed
from .._kernel.prefix import TOKEN_BYTES
from .._kernel.protocols import EvictionOrder
from .._kernel.records import Part, Run
from .._kernel.requests import LedgerRequest
from .._kernel.states import Tier
from .counts import CountedRun, HitCounts
from .status import EvictionRule, EvictionStatistics, EvictionSwitched, TierEviction

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


SAMPLED_RUNS, SAMPLED_UNITS = 2, 4
"""One run in so many is in the sample; of these, one unit in so many."""
SAMPLED = SAMPLED_RUNS * SAMPLED_UNITS
MIN_LEARNED_BLOCKS = 8
"""A sample of fewer blocks tells nothing."""
HALF_LIFE = 500
"""Runs of the sample asked for after which a hit of a shadow counts half."""
LEAD = 0.01
"""By how much what was learned has to hit more before it rules again."""
BEHIND = 0.0025
"""By how much it may hit less while it rules."""


class Shadow:
    """A cache whose blocks are only counted. Given `times`, it evicts by what was learned, else by the last use."""

    def __init__(self, capacity: int, times: ReturnTimes | None = None) -> None:
        self.capacity = capacity
        self._times = times
        self.rings = [OrderedDict[CountedRun, int]() for _ in range(1 if times is None else NUM_CLASSES)]
        """By class, the oldest first: the blocks of each run that it holds."""
        self.num_held = 0

    def ask(self, path: Sequence[tuple[CountedRun, int]]) -> int:
        """Hold so many blocks of each run of `path`, evicting others. Returns the blocks that it held, as far as no
        gap is before them. This request is among the uses of each."""
        num_hits, left, is_whole = 0, self.capacity, True
        wanted: list[tuple[CountedRun, int]] = []
        for counted, size in path:
            held = self.forget(counted) if counted.num_uses > 1 else 0
            if is_whole:
                num_hits += held
                is_whole = held == size
            if left:
                kept = min(size, left)
                wanted.append((counted, kept))
                left -= kept
        self._evict(self.num_held - left)
        for counted, size in reversed(wanted):
            self.rings[0 if self._times is None else class_of(counted.num_uses)][counted] = size
            self.num_held += size
        return num_hits

    def _evict(self, num_blocks: int) -> None:
        while num_blocks > 0:
            ring = self._worst()
            counted, held = ring.popitem(last=False)
            if held > num_blocks:
                ring[counted] = held - num_blocks
                ring.move_to_end(counted, last=False)
                held = num_blocks
            self.num_held -= held
            num_blocks -= held

    def _worst(self) -> OrderedDict[CountedRun, int]:
        """The ring whose oldest run is worth least."""
        if self._times is None:
            return self.rings[0]
        times, found, least = self._times, self.rings[0], float("inf")
        for of_class, ring in enumerate(self.rings):
            if ring:
                worth = times.worth(of_class, times.clock - next(iter(ring)).last_asked)
                if worth < least:
                    found, least = ring, worth
        return found

    def split(self, counted: CountedRun, head: CountedRun) -> None:
        """`head` is the newest: whoever splits a run asks for its head."""
        for ring in self.rings:
            if held := ring.get(counted, 0):
                front = min(held, num_sampled(head))
                ring[counted] = held - front
                if front:
                    ring[head] = front
                if front == held:
                    del ring[counted]
                return

    def forget(self, counted: CountedRun) -> int:
        """Returns how many blocks it had."""
        for ring in self.rings:
            if held := ring.pop(counted, 0):
                self.num_held -= held
                return held
        return 0


def num_sampled(counted: CountedRun) -> int:
    """Units in the sample. Which ones differs from run to run, or those at the same position of many prompts would be
    in it together; the parts of a run that is split have those that it had."""
    if counted.salt % SAMPLED_RUNS:
        return 0
    shift = SAMPLED_UNITS - 1 - counted.salt // SAMPLED_RUNS % SAMPLED_UNITS
    return (counted.stop + shift) // SAMPLED_UNITS - (counted.start + shift) // SAMPLED_UNITS


def sample_of(path: Sequence[CountedRun]) -> list[tuple[CountedRun, int]]:
    """The runs of `path` that have units in the sample, and how many."""
    return [(counted, size) for counted in path if not counted.salt % SAMPLED_RUNS and (size := num_sampled(counted))]


class Guard:
    """Which order rules in one tier: the one with more hits lately. The last use rules first; in a tier so small that
    its sample tells nothing, what was learned does."""

    def __init__(self, times: ReturnTimes, capacity: int) -> None:
        size = max(1, capacity // SAMPLED)
        self._learned, self._last_used = Shadow(size, times), Shadow(size)
        self.learned_hits = self.last_used_hits = 0.0
        """Hits of both lately."""
        self.is_learned = size < MIN_LEARNED_BLOCKS

    def asked(self, sample: Sequence[tuple[CountedRun, int]]) -> None:
        """`sample`: of the path that a request asks for; it may not be empty."""
        keep = 0.5 ** (len(sample) / HALF_LIFE)
        self.learned_hits = self.learned_hits * keep + self._learned.ask(sample)
        self.last_used_hits = self.last_used_hits * keep + self._last_used.ask(sample)
        self.judge()

    def judge(self) -> None:
        if self.is_learned:
            self.is_learned = self.learned_hits >= self.last_used_hits * (1 - BEHIND)
        else:
            self.is_learned = self.learned_hits > self.last_used_hits * (1 + LEAD)

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        if num_sampled(head):
            self._learned.split(counted, head)
            self._last_used.split(counted, head)

    def was_forgotten(self, counted: CountedRun) -> None:
        if num_sampled(counted):
            self._learned.forget(counted)
            self._last_used.forget(counted)


class LearnedOrder:
    """Ruled by what was learned or, as long as `guard` says so, by the last use."""

    def __init__(self, times: ReturnTimes, guard: Guard) -> None:
        self._times = times
        self._guard = guard
        self._plain = tuple([LeastRecentlyUsed() for _ in range(NUM_CLASSES)])
        self._spared = tuple([LeastRecentlyUsed() for _ in range(NUM_CLASSES)])
        self._last_use = 0
        self._known = [(0, 0, 0.0) for _ in range(NUM_CLASSES)]
        """By class: of which use, at which time of the clock, the worth was computed last, and what it was."""

    def asked(self, part: Part, num_uses: int) -> None:
        """The units of `part` were asked for, for the `num_uses`-th time. A class never falls: what is behind the part
        may be in it, too."""
        more = class_of(num_uses) - part.rank % NUM_CLASSES
        if more > 0:
            self._move(part, part.rank + more)

    def hinted(self, part: Part, change: int) -> None:
        """One hint more spares `part`, or one less."""
        self._move(part, max(part.rank % NUM_CLASSES, part.rank + change * NUM_CLASSES))

    def _move(self, part: Part, ring: int) -> None:
        is_linked = bool(part.blocks) and not part.num_references
        if is_linked:
            self._ring(part).remove(part)
        part.rank = ring
        if is_linked:
            self._ring(part).add_among(part)

    def _ring(self, part: Part) -> LeastRecentlyUsed:
        """By its class. Those that hints spare are apart."""
        ring = part.rank
        return self._plain[ring] if ring < NUM_CLASSES else self._spared[ring % NUM_CLASSES]

    def add(self, part: Part) -> None:
        """Uses are numbered by the clock, as ages are; each has a number of its own."""
        clock = self._times.clock
        self._last_use = last_use = clock if clock > self._last_use else self._last_use + 1
        ring = part.rank
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
        ring = part.rank
        (self._plain[ring] if ring < NUM_CLASSES else self._ring(part)).remove(part)

    def oldest(self) -> Part | None:
        plain = self._first_of([ring.first for ring in self._plain])
        return plain or self._first_of([ring.first for ring in self._spared])

    def _first_of(self, parts: list[Part | None]) -> Part | None:
        """Of the oldest ones by class: what is worth least or, of equal worth, the lower class. What is newer than one
        of a lower class, as a head is, is worth at least as much."""
        found: Part | None = None
        least: float | None = None
        for part in parts:
            if found is None or part is None:
                found = found or part
            elif part.last_use < found.last_use:
                if not self._guard.is_learned:
                    found = part
                    continue
                worth, least = self._worth(part), self._worth(found) if least is None else least
                if worth < least:
                    found, least = part, worth
        return found

    def _worth(self, part: Part) -> float:
        of_class, times = part.rank % NUM_CLASSES, self._times
        last_use, clock, worth = self._known[of_class]
        if last_use != part.last_use or clock != times.clock:
            worth = times.worth(of_class, times.clock - part.last_use)
            self._known[of_class] = (part.last_use, times.clock, worth)
        return worth

    def __iter__(self) -> Iterator[Part]:
        for rings in (self._plain, self._spared):
            parts = [ring.first for ring in rings]
            while (part := self._first_of(parts)) is not None:
                parts[part.rank % NUM_CLASSES] = part.newer
                yield part


REMEMBERED = 8
"""How often units were asked for is remembered for this many times the units that the host holds."""


class Learning:
    def __init__(self, layout: Layout, capacities: dict[Tier, int]) -> None:
        """`capacities`: blocks of each tier whose eviction learns."""
        units = {tier: max(1, num_blocks // layout.width) for tier, num_blocks in capacities.items()}
        self._times = ReturnTimes(units[Tier.HOST])
        self.guards = {tier: Guard(self._times, size) for tier, size in units.items()}
        most = REMEMBERED * max(units.values()) * layout.unit_tokens
        self.when_forgotten: Callable[[CountedRun], object] = _nobody
        """Called with each run that the history forgets."""
        self.counts = HitCounts(layout, most, layout.unit_tokens, self)
        """The history of the prompts."""
        self.tiers = tuple(units)
        self.orders: dict[Tier, LearnedOrder] = {}
        """The present order of each tier whose eviction learns."""

    def new_order(self, tier: Tier) -> EvictionOrder:
        guard = self.guards.get(tier)
        if guard is None:
            return LeastRecentlyUsed()
        self.orders[tier] = order = LearnedOrder(self._times, guard)
        return order

    @property
    def ruled(self) -> tuple[Tier, ...]:
        """The tiers that follow what was learned now."""
        return tuple([tier for tier, guard in self.guards.items() if guard.is_learned])

    # -- what requests ask for ------------------------------------------------------------------------------------

    def seen(self, request: LedgerRequest, first: int, stop: int) -> Sequence[CountedRun]:
        """`request` asks for units `[first, stop)`. Returns the runs of the history."""
        if first >= stop:
            return ()
        times, by_class = self._times, [0] * NUM_CLASSES
        now, path = times.clock, self.counts.path(request.sequence, first, stop)
        for counted in path:
            num_uses, num_units = counted.num_uses, counted.stop - counted.start
            if num_uses:
                times.returned(class_of(num_uses), counted.last_asked, num_units)
                by_class[class_of(num_uses + 1)] += num_units
            else:
                by_class[0] += num_units
            counted.used(now)
        if sample := sample_of(path):
            for guard in self.guards.values():
                guard.asked(sample)
        times.asked(by_class)
        self.counts.trim()
        if not first and path[0].num_uses > 1:
            request.uses = _uses(path)
        return path

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        for guard in self.guards.values():
            guard.was_split(counted, head)

    def was_forgotten(self, counted: CountedRun) -> None:
        for guard in self.guards.values():
            guard.was_forgotten(counted)
        self.when_forgotten(counted)

    # -- what the cache holds of it -------------------------------------------------------------------------------

    def mark(self, cache: PrefixCache, request: LedgerRequest, run: Run, start: int) -> None:
        """Tell the orders how often the units from `start` on were asked for, on the path of `run`."""
        uses = request.uses
        if not uses:
            return
        at = len(uses)
        current: Run | None = run
        while current is not None and current.stop > start:
            while at and uses[at - 1][0] >= current.stop:
                at -= 1
            if at and start < uses[at - 1][0] > current.start:
                cache.split(current, uses[at - 1][0])
            if at < len(uses):
                for tier, order in self.orders.items():
                    for part in current.parts_in(tier):
                        order.asked(part, uses[at][1])
            current = current.before


def _nobody(counted: CountedRun) -> None:
    """Hears of a run that is forgotten: does nothing."""


def _uses(path: Sequence[CountedRun]) -> tuple[tuple[int, int], ...]:
    """(stop, number of uses): where the class changes. Not of what is asked for once, which is behind all else."""
    found: list[tuple[int, int]] = []
    last = -1
    for counted in path:
        of_class = class_of(counted.num_uses)
        if not of_class:
            break
        if of_class == last:
            found.pop()
        found.append((counted.stop, counted.num_uses))
        last = of_class
    return tuple(found)


RUN_BYTES = 512
"""Of what is remembered, beside its tokens, for each stretch of a prompt."""


@dataclass(slots=True, eq=False)
class _Ruled:
    num_switches: int = 0
    num_before: int = 0
    """Blocks that were evicted until the last switch,"""
    num_by_learned: int = 0
    """and of these by what was learned."""


class Rulings:
    """Tells the observer when the guard of a tier switches between both orders."""

    def __init__(self, cache: PrefixCache, learning: Learning, moves: Moves) -> None:
        self._cache = cache
        self._learning = learning
        self._moves = moves
        self._learned = learning.ruled
        self._ruled = {tier: _Ruled() for tier in learning.tiers}

    def look(self) -> None:
        """Called when the guards have counted a request."""
        learned, before = self._learning.ruled, self._learned
        self._learned = learned
        for tier in self._learning.tiers:
            was_learned = tier in before
            if (tier in learned) is was_learned:
                continue
            ruled, num_evicted = self._ruled[tier], self._cache.tiers[tier].num_evicted
            ruled.num_switches += 1
            if was_learned:
                ruled.num_by_learned += num_evicted - ruled.num_before
            ruled.num_before = num_evicted
            self._moves.note(EvictionSwitched(self._tier(tier)))

    def _tier(self, tier: Tier) -> TierEviction:
        ruled, num_evicted, is_learned = self._ruled[tier], self._cache.tiers[tier].num_evicted, tier in self._learned
        num_by_learned = ruled.num_by_learned + (num_evicted - ruled.num_before if is_learned else 0)
        guard = self._learning.guards[tier]
        rule = EvictionRule.LEARNED if is_learned else EvictionRule.LRU
        return TierEviction(
            tier, rule, guard.learned_hits, guard.last_used_hits, ruled.num_switches, num_by_learned,
            num_evicted - num_by_learned,
        )  # fmt: skip

    def statistics(self) -> EvictionStatistics:
        counts = self._learning.counts
        num_runs, num_tokens = len(counts), counts.num_tokens - len(counts) * self._cache.layout.unit_tokens
        tiers = tuple(self._tier(tier) for tier in self._learning.tiers)
        return EvictionStatistics(tiers, num_runs, num_tokens * TOKEN_BYTES + num_runs * RUN_BYTES)

"""Learned eviction: evict the blocks that will bring the fewest hits for the space that they take.

**The return times** (`ReturnTimes`). A prefix *returns* when it is requested again. `ReturnTimes` measures the time
until a prefix returns, separately for each *class*: prefixes that were requested once, twice, 3 or 4 times, or more
often. The clock advances by one for each requested unit of tokens. The age of a unit is the time since its last
request. Ages are counted in bins. Each bin ends at 1.5 times the age at which the bin before it ends:

    age      0 |....|......|.........|..............|.....................|  ...
    bin          0     1        2           3                  4
    counted    [units that reached the bin] [of those, units that returned within it]      one row per class

For a unit of some age, the counts of the later bins give, for each later age, the probability that the unit returns by
then, and the expected time that it stays in the cache until then. The worth of the unit is the largest quotient of the
two.

**The order** (`LearnedOrder`). The parts of each class are in one list, the oldest first. The order compares the oldest
parts of all lists, and evicts the part that is worth least:

    requested once     oldest [a][d][g][h] newest
    twice                     [b][e]                worth(class, age): see `ReturnTimes`
    3 or 4 times              [c]
    more often                [f]

Parts that hints spare are in a second set of such lists, and are evicted last. A prefix is in the same class as its
suffix or in a higher one, and it is as old or newer. So the prefix is worth at least as much, and the suffix is evicted
first.

**The guard** (`Guard`). The learned order may get fewer hits than LRU. So two small simulated caches (`Shadow`) process
a sample of the requested units, one in `SAMPLED`, and have the same fraction of the capacity. One evicts in the learned
order, the other in LRU order. The real cache uses the order whose simulated cache has more hits. `Rulings` reports when
the order changes, and counts the evictions in each order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from .._common.prefix import TOKEN_BYTES
from .._common.tiers import Tier
from .._kernel.cache import PrefixCache
from .._kernel.layout import Layout
from .._kernel.moves import Moves
from .._kernel.pools import LeastRecentlyUsed
from .._kernel.protocols import EvictionOrder
from .._kernel.records import LedgerRequest, Part, Run
from .accounts import AccountOrder
from .counts import CountedRun, HitCounts
from .status import EvictionRule, EvictionStatistics, EvictionSwitched, TierEviction

NUM_CLASSES = 4
NUM_BINS = 24
GROWTH = 1.5
"""The end of a bin, divided by the end of the bin before it."""
FIRST_BIN = 32
"""The capacity, divided by the length of the first bin."""
MERGED = 8
"""The counts are recorded at times that are apart by about their age divided by this."""
PRIOR_REQUESTS = 4.0
"""Weight of the return rates of all classes in each bin of one class, in requests. A class with few requests in a bin
has about the rates of all classes."""
EVERY = 128
"""Requests between two computations of the worth."""
KEPT = 0.5 ** (EVERY / 4000)
"""Counts are multiplied by this every `EVERY` requests, so a count is halved after 4000 requests."""
MOST = 0.999
"""Upper bound on the estimated return probability."""
AFTER_ALL = [inf]
"""Sorts after all counts that can be recorded at the same time."""

_CLASS_OF = (0, 0, 1, 2, 2)
TOP_USES = 5
"""From this many requests on, a run is in the highest class."""


def class_of(num_uses: int) -> int:
    """The class by the number of requests: 0 for one, 1 for two, 2 for 3 or 4, and 3 for more."""
    return _CLASS_OF[num_uses] if num_uses < 5 else 3


class ReturnTimes:
    """Counts returns, and computes the worth of blocks from them: `worth(class, age)`. The worth never rises with the
    age, and never falls with the class. A prefix is requested at least as often and as recently as its suffix, so the
    prefix is worth at least as much."""

    def __init__(self, capacity: int) -> None:
        first = max(1.0, capacity / FIRST_BIN)
        self.clock = 1
        """Units requested so far, plus 1, because 0 means no time."""
        self.num_requests = 0
        self._ends = [first * GROWTH**number for number in range(NUM_BINS)]
        self._starts = [0.0, *self._ends[:-1]]
        self._lengths = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        self._asked = [0.0] * NUM_CLASSES
        self._returned = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._past: list[tuple[int, list[float]]] = [(0, [0.0] * NUM_CLASSES)]
        """Records of `_asked`, each with its time, the oldest first. The older the records, the larger the gaps between
        their times."""
        self._worth = [[1.0 / (1 + number) for number in range(NUM_BINS)] for _ in range(NUM_CLASSES)]
        """The initial values give LRU order."""

    def worth(self, of_class: int, age: int) -> float:
        number, worth = bisect_right(self._ends, age), self._worth[of_class]
        if number + 1 >= NUM_BINS:
            return worth[-1]
        own = worth[number]
        return own + (worth[number + 1] - own) * (age - self._starts[number]) / self._lengths[number]

    # -- counting -------------------------------------------------------------------------------------------------

    def returned(self, of_class: int, since: int, num_units: int) -> None:
        """Count units that are requested again. They were last requested at time `since`, and were in `of_class`
        then."""
        number = bisect_right(self._ends, self.clock - since)
        if number < NUM_BINS:
            self._returned[of_class][number] += num_units

    def asked(self, by_class: list[int]) -> None:
        """Count one request. `by_class`: the number of its units in each class, this request included. Call it after
        `returned`, because it advances the clock."""
        for of_class, num_units in enumerate(by_class):
            if num_units:
                self._asked[of_class] += num_units
                self.clock += num_units
        self.num_requests += 1
        if not self.num_requests % EVERY:
            self._compute()
            for counts in (self._asked, *self._returned):
                counts[:] = [count * KEPT for count in counts]

    # -- the worth ------------------------------------------------------------------------------------------------

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
        """Record `_asked`, and drop older records whose times are too close together for their age."""
        past, clock = self._past, self.clock
        kept = past[:1]
        for at in range(1, len(past)):
            after = past[at + 1][0] if at + 1 < len(past) else clock
            if (after - kept[-1][0]) * MERGED >= clock - after:
                kept.append(past[at])
        kept.append((clock, self._asked.copy()))
        self._past = kept

    def _reached(self) -> list[list[float]]:
        """For each class, the number of units that have reached each bin: the units that were requested long enough
        ago, without those that returned in an earlier bin."""
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
        """The worth in each bin. `rates`: the share of the units that reach a bin and return within it. The worth is at
        least `floor`, and never rises from one bin to the next.

        From the last bin backwards, each stretch of bins is joined with the stretch after it while that stretch is
        worth more. The end of the joined stretch is the best age to keep a block for."""
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
    """For each bin, the sum of its count and the counts of both neighbours."""
    sides = zip([0.0, *counts[:-1]], counts, [*counts[1:], 0.0], strict=True)
    return [before + own + after for before, own, after in sides]


SAMPLED_RUNS, SAMPLED_UNITS = 2, 4
"""The sample has one run in `SAMPLED_RUNS`, and of these runs one unit in `SAMPLED_UNITS`."""
SAMPLED = SAMPLED_RUNS * SAMPLED_UNITS
MIN_LEARNED_BLOCKS = 8
"""A sample of fewer blocks is too small to compare the orders."""
HALF_LIFE = 500
"""A hit of a simulated cache counts half after this many requests for runs of the sample."""
LEAD = 0.01
"""The share by which the learned order must have more hits than LRU before the tier uses it again."""
BEHIND = 0.0025
"""The share by which the learned order may have fewer hits than LRU while the tier uses it."""


class Shadow:
    """A simulated cache, which only counts blocks. It evicts in the learned order if it has `times`, else in LRU
    order."""

    def __init__(self, capacity: int, times: ReturnTimes | None = None) -> None:
        self.capacity = capacity
        self._times = times
        self.rings = [OrderedDict[CountedRun, int]() for _ in range(1 if times is None else NUM_CLASSES)]
        """For each class, the number of blocks that it holds of each run, the oldest run first."""
        self.num_held = 0

    def ask(self, path: Sequence[tuple[CountedRun, int]]) -> int:
        """Request the runs of `path`, each with its number of sampled blocks: hold them, and evict others. Returns the
        number of blocks that were held before the first gap. `num_uses` of each run includes this request."""
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
        """`counted` was split. `head` becomes the newest run, because a run is only split by a request for its head."""
        for ring in self.rings:
            if held := ring.get(counted, 0):
                front = min(held, num_sampled(head))
                ring[counted] = held - front
                if front:
                    ring[head] = front
                if front == held:
                    del ring[counted]
                return

    def merge(self, counted: CountedRun, head: CountedRun) -> None:
        """`head` was merged into `counted`, which was requested together with it."""
        for ring in self.rings:
            if held := ring.pop(head, 0):
                ring[counted] = ring.get(counted, 0) + held

    def forget(self, counted: CountedRun) -> int:
        """Remove `counted`. Returns the number of blocks that were held of it."""
        for ring in self.rings:
            if held := ring.pop(counted, 0):
                self.num_held -= held
                return held
        return 0


def num_sampled(counted: CountedRun) -> int:
    """The number of units of `counted` in the sample. The salt of the run decides which ones, because otherwise the
    same positions of all prompts would be in the sample. A split changes no unit's place in the sample."""
    if counted.salt % SAMPLED_RUNS:
        return 0
    shift = SAMPLED_UNITS - 1 - counted.salt // SAMPLED_RUNS % SAMPLED_UNITS
    return (counted.stop + shift) // SAMPLED_UNITS - (counted.start + shift) // SAMPLED_UNITS


def sample_of(path: Sequence[CountedRun]) -> list[tuple[CountedRun, int]]:
    """The runs of `path` that have units in the sample, each with their number."""
    return [(counted, size) for counted in path if not counted.salt % SAMPLED_RUNS and (size := num_sampled(counted))]


class Guard:
    """Decides which order one tier uses: the order with more recent hits in its simulated cache. A tier starts with
    LRU, and a tier that is too small to compare the orders starts with the learned order."""

    def __init__(self, times: ReturnTimes, capacity: int) -> None:
        size = max(1, capacity // SAMPLED)
        self._learned, self._last_used = Shadow(size, times), Shadow(size)
        self.learned_hits = self.last_used_hits = 0.0
        """Hits of both simulated caches. Older hits count less."""
        self.is_learned = size < MIN_LEARNED_BLOCKS

    def asked(self, sample: Sequence[tuple[CountedRun, int]]) -> None:
        """`sample`: the sampled runs of the units that a request requests. It must not be empty."""
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

    def was_merged(self, counted: CountedRun, head: CountedRun) -> None:
        if num_sampled(head):
            self._learned.merge(counted, head)
            self._last_used.merge(counted, head)

    def was_forgotten(self, counted: CountedRun) -> None:
        if num_sampled(counted):
            self._learned.forget(counted)
            self._last_used.forget(counted)


class UseList(LeastRecentlyUsed):
    """The parts of one class, by `last_use`. Learned eviction numbers the uses, because ages are computed from them."""

    def add_used(self, part: Part, last_use: int) -> None:
        """Add `part` as the newest, with `last_use` as its number."""
        self._num_uses = last_use - 1
        self.add(part)

    def add_among(self, part: Part) -> None:
        """Insert `part`, which was in another list, by its `last_use`. Parts that were split from one part have the
        same `last_use`: of these, the tail is evicted before the head, whichever is inserted first."""
        self.add_back(part)
        older = part.older
        while older is not None and older.last_use == part.last_use and older.run.start < part.run.start:
            older = older.older
        if older is not part.older:
            self.remove(part)
            self._link(part, older)

    def add_as_old(self, part: Part, than: Part) -> None:
        """Insert `part` at the place that `than`, which is in another list, would have here."""
        part.last_use = than.last_use
        self.add_back(part)


class LearnedOrder:
    """The eviction order of one tier: the learned order, or LRU while `guard` has decided for it."""

    def __init__(self, times: ReturnTimes, guard: Guard) -> None:
        self._times = times
        self._guard = guard
        self._plain = tuple([UseList() for _ in range(NUM_CLASSES)])
        self._spared = tuple([UseList() for _ in range(NUM_CLASSES)])
        self._last_use = 0
        self._worths = [(0, 0, 0.0) for _ in range(NUM_CLASSES)]
        """The worth that was computed last, by class: (last use of the part, clock at the computation, worth)."""

    def asked(self, part: Part, num_uses: int) -> None:
        """The units of `part` were requested for the `num_uses`-th time. The class of a part never falls, because the
        parts after it may be in the same class."""
        more = class_of(num_uses) - part.rank % NUM_CLASSES
        if more > 0:
            self._move(part, part.rank + more)

    def hinted(self, part: Part, change: int) -> None:
        """One hint more spares `part` (`change` is 1), or one hint less (-1)."""
        self._move(part, max(part.rank % NUM_CLASSES, part.rank + change * NUM_CLASSES))

    def _move(self, part: Part, ring: int) -> None:
        is_linked = bool(part.blocks) and not part.num_references
        if is_linked:
            self._ring(part).remove(part)
        part.rank = ring
        if is_linked:
            self._ring(part).add_among(part)

    def _ring(self, part: Part) -> UseList:
        """The list of the class of `part`. Spared parts have lists of their own."""
        ring = part.rank
        return self._plain[ring] if ring < NUM_CLASSES else self._spared[ring % NUM_CLASSES]

    def add(self, part: Part) -> None:
        """Numbers the use by the clock, because ages are computed from these numbers. No two uses have the same
        number."""
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

    def goes_first(self, part: Part, other: Part) -> bool:
        """Whether `part` is evicted before `other`, which is in another order of the same tier."""
        is_spared, other_is_spared = part.rank >= NUM_CLASSES, other.rank >= NUM_CLASSES
        if is_spared is not other_is_spared:
            return other_is_spared
        if self._guard.is_learned:
            return self._worth(part) < self._worth(other)
        return part.last_use < other.last_use

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        return older.newer is newer

    def _first_of(self, parts: list[Part | None]) -> Part | None:
        """The part to evict first. `parts` has the oldest part of each class. In the learned order it is the part that
        is worth least, or the one in the lower class if both are worth the same. A part that is newer than a part of a
        lower class is worth at least as much, so it is not compared."""
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
        last_use, clock, worth = self._worths[of_class]
        if last_use != part.last_use or clock != times.clock:
            worth = times.worth(of_class, times.clock - part.last_use)
            self._worths[of_class] = (part.last_use, times.clock, worth)
        return worth

    def __iter__(self) -> Iterator[Part]:
        for rings in (self._plain, self._spared):
            parts = [ring.first for ring in rings]
            while (part := self._first_of(parts)) is not None:
                parts[part.rank % NUM_CLASSES] = part.newer
                yield part


REMEMBERED = 8
"""The history counts the requests of this many times the units that the largest tier can hold."""


class Learning:
    def __init__(self, layout: Layout, capacities: dict[Tier, int]) -> None:
        """`capacities`: blocks of each tier whose eviction learns."""
        units = {tier: max(1, num_blocks // layout.width) for tier, num_blocks in capacities.items()}
        self._times = ReturnTimes(units[Tier.HOST])
        self.guards = {tier: Guard(self._times, size) for tier, size in units.items()}
        most = REMEMBERED * max(units.values()) * layout.unit_tokens
        self.when_forgotten: Callable[[CountedRun], object] = _nobody
        """Called with each run that the history forgets."""
        self.counts = HitCounts(layout, most, layout.unit_tokens, self, TOP_USES)
        """The history of the prompts."""
        self.tiers = tuple(units)
        self.orders: dict[Tier, LearnedOrder | AccountOrder] = {}
        """The present order of each tier whose eviction learns. `Eviction` sets it."""
        self.uses: dict[LedgerRequest, tuple[tuple[int, int], ...]] = {}
        """How often the prompt of each live request was requested before, as (stop, number)."""

    def new_order(self, tier: Tier) -> EvictionOrder:
        guard = self.guards.get(tier)
        if guard is None:
            return LeastRecentlyUsed()
        return LearnedOrder(self._times, guard)

    @property
    def ruled(self) -> tuple[Tier, ...]:
        """The tiers that use the learned order now."""
        return tuple([tier for tier, guard in self.guards.items() if guard.is_learned])

    # -- requests -------------------------------------------------------------------------------------------------

    def seen(self, request: LedgerRequest, first: int, stop: int) -> Sequence[CountedRun]:
        """Count that `request` requests units `[first, stop)`. Returns their runs in the history."""
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
            self.uses[request] = _uses(path)
        return path

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        for guard in self.guards.values():
            guard.was_split(counted, head)

    def was_merged(self, counted: CountedRun, head: CountedRun) -> None:
        for guard in self.guards.values():
            guard.was_merged(counted, head)
        self.when_forgotten(head)

    def was_forgotten(self, counted: CountedRun) -> None:
        for guard in self.guards.values():
            guard.was_forgotten(counted)
        self.when_forgotten(counted)

    # -- cached parts ---------------------------------------------------------------------------------------------

    def mark(self, cache: PrefixCache, request: LedgerRequest, run: Run, start: int) -> None:
        """Tell the orders how often the units from `start` on, on the path of `run`, were requested.

        While the learned order is in use, a run is split where the class changes. Splits are costly, so while LRU is in
        use, a run that has a class already is not split again: it gets the class of its last unit."""
        uses = self.uses.get(request)
        if uses is None:
            return
        at, is_in_use = len(uses), bool(self.ruled)
        current: Run | None = run
        while current is not None and current.stop > start:
            while at and uses[at - 1][0] >= current.stop:
                at -= 1
            changes_at = uses[at - 1][0] if at else 0
            has_class = current.parts[Tier.HOST].rank % NUM_CLASSES > 0
            if start < changes_at > current.start and (is_in_use or not has_class):
                cache.split(current, changes_at)
            if at < len(uses):
                for tier, order in self.orders.items():
                    for part in current.parts_in(tier):
                        order.asked(part, uses[at][1])
            current = current.before


def _nobody(counted: CountedRun) -> None:
    """Default of `Learning.when_forgotten`: does nothing."""


def _uses(path: Sequence[CountedRun]) -> tuple[tuple[int, int], ...]:
    """(stop, number of uses) for each stretch of `path` whose runs are in one class. Runs that were requested once are
    left out: they come last."""
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
"""Approximate size of a run of the history, without its tokens."""


@dataclass(slots=True, eq=False)
class _Ruled:
    num_switches: int = 0
    num_before: int = 0
    """Blocks evicted until the last switch."""
    num_by_learned: int = 0
    """Those of them that were evicted while the learned order was in use."""


class Rulings:
    """Reports to the observer when the guard of a tier switches between the two orders."""

    def __init__(self, cache: PrefixCache, learning: Learning, moves: Moves) -> None:
        self._cache = cache
        self._learning = learning
        self._moves = moves
        self._learned = learning.ruled
        self._ruled = {tier: _Ruled() for tier in learning.tiers}

    def look(self) -> None:
        """Report switches. Called after the guards have counted a request."""
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

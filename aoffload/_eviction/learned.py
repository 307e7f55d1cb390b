"""Learned eviction: evict the blocks that will bring the fewest hits for the space and the time that they take.

**The order** (`LearnedOrder`). It evicts the end of the idle path that is worth least (`IdlePaths`). How much a block
is worth depends on its bucket and its age (`ReturnTimes`), and the bucket on the hints about its prompt or, without
hints, on the number of its requests.

**The history** (`Learning`, `HitCounts`). Counts are about requests and not about cached blocks, so they outlive
eviction. A prompt that is requested ends the idle time of its prefixes (`began`). At the end of its request, the prompt
and its answer become idle (`ended`). A hint moves them to another bucket (`hinted`).

**The guard** (`Guard`). The learned order may get fewer hits than LRU. So two simulated caches (`Shadow`), which only
count blocks, have the capacity of the tier and process all requests. One evicts in the learned order, the other in LRU
order. The tier uses the order whose simulated cache has more recent hits. `GuardReports` reports when the order
changes, and counts the evictions in each order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from .._common.prefix import TOKEN_BYTES, Root
from .._common.tiers import Tier
from .._kernel.cache import PrefixCache
from .._kernel.layout import Layout
from .._kernel.moves import Moves
from .._kernel.pools import LeastRecentlyUsed
from .._kernel.protocols import EvictionOrder
from .._kernel.records import LedgerRequest, Part, Run
from .._kernel.tokens import TokenSequence
from .accounts import AccountOrder
from .counts import CountedRun, HitCounts
from .idle import IdlePaths
from .returns import NEVER, NUM_CLASSES, TICKS, ReturnTimes, bin_of, class_of
from .status import EvictionRule, EvictionStatistics, EvictionSwitched, TierEviction

KEPT = 0.5 ** (1 / 1000)
"""Hits of the simulated caches are multiplied by this at each request, so a hit counts half after 1000 requests."""
LEAD = 0.02
"""Before a tier uses the learned order, that order must have more hits than LRU, by this share of the hits of LRU. If
`FEWER_MISSES` asks for fewer hits, these are enough."""
FEWER_MISSES = 0.1
"""As `LEAD`, but a share of the misses of LRU. It asks for less than `LEAD` where LRU misses little."""


class Shadow:
    """A simulated cache in LRU order, which only counts blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[CountedRun, int] = {}
        """The number of units that it holds of each run; the oldest first."""
        self.num_held = 0

    def num_hits(self, path: Sequence[CountedRun]) -> int:
        """The units of `path` that it holds, up to the first gap."""
        num_hits = 0
        for counted in path:
            held = self.held.get(counted, 0)
            num_hits += held
            if held != counted.stop - counted.start:
                break
        return num_hits

    def put(self, path: Sequence[CountedRun]) -> None:
        """A request for `path` is over: hold its runs as the newest, and evict others."""
        if path[-1].stop > self.capacity:
            self._put_front(path)
            return
        hold = self._hold
        for counted in reversed(path):
            hold(counted, counted.stop - counted.start)
        if self.num_held > self.capacity:
            self._evict(self.num_held - self.capacity)

    def _put_front(self, path: Sequence[CountedRun]) -> None:
        """Hold as much of `path` as fits."""
        for counted in list(self.held):
            self.forget(counted)
        left, wanted = self.capacity, list[tuple[CountedRun, int]]()
        for counted in path:
            if size := min(counted.stop - counted.start, left):
                wanted.append((counted, size))
                left -= size
        for counted, size in reversed(wanted):
            self._hold(counted, size)

    def _hold(self, counted: CountedRun, size: int) -> None:
        """Hold `size` units of `counted`, as the newest."""
        held = self.held
        self.num_held += size - held.pop(counted, 0)
        held[counted] = size

    def _evict(self, num_units: int) -> None:
        while num_units > 0:
            counted = self._worst()
            held = self.held[counted]
            if held > num_units:
                self.held[counted] = held - num_units
                self.num_held -= num_units
                return
            self.forget(counted)
            num_units -= held

    def _worst(self) -> CountedRun:
        return next(iter(self.held))

    def forget(self, counted: CountedRun) -> None:
        """Remove `counted`, if it is held."""
        self.num_held -= self.held.pop(counted, 0)

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        """`counted` was split. `head` becomes the newest run, because a run is only split where a prompt leaves it."""
        if held := self.held.get(counted, 0):
            front = min(held, head.stop - head.start)
            self.held[counted] = held - front
            self.held[head] = front
            if held == front:
                del self.held[counted]

    def was_merged(self, counted: CountedRun, head: CountedRun) -> None:
        """`head` was merged into `counted`, which was requested together with it."""
        if held := self.held.pop(head, 0):
            self.held[counted] = self.held.get(counted, 0) + held


class LearnedShadow(Shadow):
    """A simulated cache in the learned order."""

    def __init__(self, capacity: int, times: ReturnTimes) -> None:
        super().__init__(capacity)
        self._idle: IdlePaths[CountedRun] = IdlePaths(times)

    def _hold(self, counted: CountedRun, size: int) -> None:
        before = self.held.get(counted)
        self.held[counted] = size
        if before is not None:
            self.num_held += size - before
            self._idle.move(counted, counted.bucket, counted.last_asked)
        else:
            self.num_held += size
            self._idle.add(counted, counted.before, counted.bucket, counted.last_asked)

    def _worst(self) -> CountedRun:
        worst = self._idle.least_worth()
        assert worst is not None, "holds nothing"
        return worst

    def forget(self, counted: CountedRun) -> None:
        if counted in self.held:
            self._idle.remove(counted)
            super().forget(counted)

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        if held := self.held.get(counted, 0):
            front = min(held, head.stop - head.start)
            self.forget(counted)
            if held > front:
                self._hold(counted, held - front)
            self._hold(head, front)

    def was_merged(self, counted: CountedRun, head: CountedRun) -> None:
        if held := self.held.get(head, 0) + self.held.get(counted, 0):
            self.forget(head)
            self.forget(counted)
            self._hold(counted, held)

    def moved(self, counted: CountedRun) -> None:
        """The bucket of `counted` was changed."""
        if counted in self.held:
            self._idle.move(counted, counted.bucket)


class Guard:
    """Decides which order one tier uses: the order with more recent hits in its simulated cache. A tier starts with
    LRU."""

    def __init__(self, times: ReturnTimes, capacity: int) -> None:
        self.learned, self.lru = LearnedShadow(capacity, times), Shadow(capacity)
        self.shadows: tuple[Shadow, Shadow] = (self.learned, self.lru)
        self.learned_hits = self.lru_hits = self._num_requested = 0.0
        """Hits of both simulated caches, and requested units. Older ones count less."""
        self.is_learned = False

    def began(self, path: Sequence[CountedRun]) -> bool:
        """Count a request for `path`. Returns whether the order changes."""
        keep = KEPT
        self.learned_hits = self.learned_hits * keep + self.learned.num_hits(path)
        self.lru_hits = self.lru_hits * keep + self.lru.num_hits(path)
        self._num_requested = self._num_requested * keep + path[-1].stop
        was_learned, hits, lead = self.is_learned, self.lru_hits, 0.0
        if not was_learned:
            lead = min(LEAD * hits, FEWER_MISSES * (self._num_requested - hits))
        self.is_learned = self.learned_hits > hits + lead
        return self.is_learned is not was_learned


class LearnedOrder:
    """The eviction order of one tier: the learned order, or LRU while `guard` has decided for it."""

    def __init__(self, times: ReturnTimes, guard: Guard) -> None:
        self._times = times
        self._guard = guard
        self._idle: IdlePaths[Part] = IdlePaths(times)
        self._last_use = 0

    def labelled(self, part: Part, bucket: int) -> None:
        """Put `part`, idle or not, into `bucket`."""
        part.rank = bucket
        if part in self._idle:
            self._idle.move(part, bucket)

    def add(self, part: Part) -> None:
        """The number of a use is its time in ticks. No two uses have the same number."""
        last_use, now = self._last_use + 1, self._times.now
        part.last_use = self._last_use = last_use = now if now > last_use else last_use
        self._idle.add(part, _before(part), part.rank, last_use)

    def add_newer(self, part: Part, than: Part) -> None:
        """`part` is evicted after `than` because it is a prefix of it, or it takes the place of `than`."""
        part.last_use = than.last_use
        self._idle.add(part, _before(part), part.rank, part.last_use)
        if than.run.before is part.run:
            self._idle.reparent(than, part)

    def add_back(self, part: Part) -> None:
        self._idle.add(part, _before(part), part.rank, part.last_use)

    def remove(self, part: Part) -> None:
        """If `part` is merged into the part after it, that part follows the parent of `part` from now on."""
        if part.blocks and not part.num_references:
            self._idle.adopt(part)
        self._idle.remove(part)

    def oldest(self) -> Part | None:
        return self._idle.least_worth() if self._guard.is_learned else self._idle.oldest()

    def parts(self) -> Iterable[Part]:
        return self._idle.nodes()

    def key(self, part: Part) -> tuple[float, int]:
        """Compares parts of several orders of the same tier."""
        times, worth = self._times, 0.0
        if self._guard.is_learned:
            worth = times.worth[part.rank][bin_of(times.now - part.last_use)]
        return worth, part.last_use

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        """Whether they were released one after the other."""
        return newer.last_use - older.last_use in (0, 1)

    def __iter__(self) -> Iterator[Part]:
        return self._idle.in_order(by_worth=self._guard.is_learned)


def _before(part: Part) -> Part | None:
    before = part.run.before
    return None if before is None else before.part(part.tier, part.component)


def _are_alike(head: CountedRun, run: CountedRun) -> bool:
    """Whether two runs that were requested together have the same bucket. Without a hint, it follows from the number of
    requests."""
    if head.bucket != run.bucket or head.idle_since != run.idle_since:
        return False
    return run.bucket >= NUM_CLASSES or class_of(head.num_uses) == class_of(run.num_uses)


REMEMBERED = 8
"""The history counts the requests of this many times the units that the largest tier can hold."""


class Learning:
    def __init__(self, layout: Layout, capacities: dict[Tier, int]) -> None:
        """`capacities`: blocks of each tier whose eviction learns."""
        units = {tier: max(1, num_blocks // layout.width) for tier, num_blocks in capacities.items()}
        self.times = ReturnTimes()
        self.guards = {tier: Guard(self.times, size) for tier, size in units.items()}
        self._shadows = tuple([shadow for guard in self.guards.values() for shadow in guard.shadows])
        most = REMEMBERED * max(units.values()) * layout.unit_tokens
        self.counts = HitCounts(layout, most, layout.unit_tokens, self, _are_alike)
        """The history of the prompts."""
        self.tiers = tuple(units)
        self.orders: dict[Tier, LearnedOrder | AccountOrder] = {}
        """The present order of each tier whose eviction learns. `Eviction` sets it."""
        self._live: dict[LedgerRequest, tuple[Sequence[CountedRun], Root]] = {}
        """The runs of the prompt of each request that has begun and not ended, as they were when it began; and its
        root, because a request that has not computed yet gets another one if the weights change."""

    def is_live(self, request: LedgerRequest) -> bool:
        """Whether `request` has begun, and has not ended."""
        return request in self._live

    def new_order(self, tier: Tier) -> EvictionOrder:
        guard = self.guards.get(tier)
        if guard is None:
            return LeastRecentlyUsed()
        return LearnedOrder(self.times, guard)

    @property
    def learned_tiers(self) -> tuple[Tier, ...]:
        """The tiers that use the learned order now."""
        return tuple([tier for tier, guard in self.guards.items() if guard.is_learned])

    # -- requests -------------------------------------------------------------------------------------------------

    def began(self, request: LedgerRequest) -> bool:
        """Count that `request` requests its prompt, which is not idle any more. Returns whether the order of a tier
        changes."""
        stop = request.sequence.num_prompt_units
        if not stop:
            return False
        times = self.times
        now, path = times.advance(), self.counts.path(request.sequence, 0, stop)
        for counted in path:
            if counted.idle_since:
                times.returned(counted.bucket, counted.idle_since, counted.stop - counted.start)
                counted.idle_since = 0
            counted.last_asked = now
            counted.num_uses = num_uses = counted.num_uses + 1
            counted.bucket = num_uses - 1 if num_uses < NUM_CLASSES else NUM_CLASSES - 1
        changes = [guard.began(path) for guard in self.guards.values()]
        times.counted()
        self.counts.trim()
        self._live[request] = path, request.sequence.root
        return any(changes)

    def ended(self, cache: PrefixCache, request: LedgerRequest, stop: int, run: Run | None) -> None:
        """The first `stop` units of `request` are idle from now on, because it is over or about to be. `run`: the last
        cached run of its path."""
        path, root = self._live.pop(request, ((), request.sequence.root))
        if path and root != request.sequence.root:
            self._rest(path)
            path = ()
        if not stop:
            return
        path = self.counts.path_from(path, request.sequence, stop)
        self._rest(path)
        for shadow in self._shadows:
            shadow.put(path)
        self.counts.trim()
        if run is not None:
            self._label_path(cache, run, _labels(path), splits=bool(self.learned_tiers))

    def _rest(self, path: Sequence[CountedRun]) -> None:
        """The runs of `path` are idle from now on."""
        times = self.times
        now = times.advance()
        for counted in path:
            if not counted.num_uses:
                counted.num_uses = 1
            if not counted.idle_since:
                times.idle(counted.bucket, counted.stop - counted.start)
            counted.last_asked = counted.idle_since = now

    def hinted(self, cache: PrefixCache, sequence: TokenSequence, in_s: float | None, category: str) -> int:
        """Put `sequence`, up to its last whole unit, into the bucket of a hint. Returns the number of cached units.

        Prefixes that other requests have used since keep their buckets. If the prediction is that the prompt does not
        return, prefixes that other prompts continue keep their buckets, too. The age of a prefix counts from its last
        use, so the prediction does, too."""
        times = self.times
        now, path = times.advance(), self.counts.known(sequence, sequence.num_tokens // cache.layout.unit_tokens)
        if not path:
            return 0
        since = path[-1].idle_since
        if in_s is not None and since:
            in_s += (now - since) / TICKS
        bucket, own = times.bucket(category, in_s), path
        if in_s == NEVER:
            own = list(takewhile(lambda counted: counted.num_after < 1 + (counted is not path[-1]), reversed(path)))
        for counted in own:
            if counted.idle_since == since and counted.bucket != bucket:
                if since:
                    times.moved(counted.bucket, bucket, counted.stop - counted.start)
                counted.bucket = bucket
                for guard in self.guards.values():
                    guard.learned.moved(counted)
        return self._label_cached(cache, sequence, path, is_idle=bool(since))

    def _label_cached(
        self, cache: PrefixCache, sequence: TokenSequence, path: Sequence[CountedRun], *, is_idle: bool
    ) -> int:
        """Put the cached parts of `sequence` into the buckets of `path`, its runs in the history. Returns the number of
        cached units. The parts that a live request uses are put there when it ends."""
        num_units, last = 0, None
        for found, agreed in list(cache.index.walk(sequence, path[-1].stop)):
            num_units = agreed
            if is_idle:
                last = cache.cut(found, agreed)
        if last is not None:
            self._label_path(cache, last, _labels(path), splits=False)
        return num_units

    def _label_path(self, cache: PrefixCache, run: Run, labels: Sequence[tuple[int, int]], *, splits: bool) -> None:
        """Put the parts on the path of `run` into the buckets of `labels`: (stop, bucket). With `splits`, a run is
        split where the bucket changes. Otherwise it gets the bucket of its last unit, because splits are costly."""
        at = len(labels)
        current: Run | None = run
        while current is not None:
            while at and labels[at - 1][0] >= current.stop:
                at -= 1
            changes_at = labels[at - 1][0] if splits and at else 0
            if current.start < changes_at and any(part.stop > changes_at for part in current.parts):
                cache.split(current, changes_at)  # a tail without blocks would stay in the index
            bucket = labels[at][1] if at < len(labels) else 0
            if current.parts[Tier.HOST].rank != bucket:  # in all tiers and components
                for tier, order in self.orders.items():
                    for part in current.parts_in(tier):
                        order.labelled(part, bucket)
            current = current.before

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        for shadow in self._shadows:
            shadow.was_split(counted, head)

    def was_merged(self, counted: CountedRun, head: CountedRun) -> None:
        for shadow in self._shadows:
            shadow.was_merged(counted, head)

    def was_forgotten(self, counted: CountedRun) -> None:
        for shadow in self._shadows:
            shadow.forget(counted)


def _labels(path: Sequence[CountedRun]) -> tuple[tuple[int, int], ...]:
    """(stop, bucket) for each stretch of `path` whose runs are in one bucket."""
    found: list[tuple[int, int]] = []
    for counted in path:
        if found and found[-1][1] == counted.bucket:
            found.pop()
        found.append((counted.stop, counted.bucket))
    return tuple(found)


RUN_BYTES = 512
"""Approximate size of a run of the history, without its tokens."""


@dataclass(slots=True, eq=False)
class _TierReport:
    num_switches: int = 0
    num_before: int = 0
    """Blocks evicted until the last switch."""
    num_by_learned: int = 0
    """Those of them that were evicted while the learned order was in use."""


class GuardReports:
    """Reports to the observer when the guard of a tier switches between the two orders."""

    def __init__(self, cache: PrefixCache, learning: Learning, moves: Moves) -> None:
        self._cache = cache
        self._learning = learning
        self._moves = moves
        self._learned = learning.learned_tiers
        self._reports = {tier: _TierReport() for tier in learning.tiers}

    def report_switches(self) -> None:
        """Report switches. Called after the guards have counted a request."""
        learned, before = self._learning.learned_tiers, self._learned
        self._learned = learned
        for tier in self._learning.tiers:
            was_learned = tier in before
            if (tier in learned) is was_learned:
                continue
            report, num_evicted = self._reports[tier], self._cache.tiers[tier].num_evicted
            report.num_switches += 1
            if was_learned:
                report.num_by_learned += num_evicted - report.num_before
            report.num_before = num_evicted
            self._moves.note(EvictionSwitched(self._tier(tier)))

    def _tier(self, tier: Tier) -> TierEviction:
        report, num_evicted, is_learned = (
            self._reports[tier],
            self._cache.tiers[tier].num_evicted,
            tier in self._learned,
        )
        num_by_learned = report.num_by_learned + (num_evicted - report.num_before if is_learned else 0)
        guard = self._learning.guards[tier]
        rule = EvictionRule.LEARNED if is_learned else EvictionRule.LRU
        return TierEviction(
            tier, rule, guard.learned_hits, guard.lru_hits, report.num_switches, num_by_learned,
            num_evicted - num_by_learned,
        )  # fmt: skip

    def statistics(self) -> EvictionStatistics:
        counts = self._learning.counts
        num_runs, num_tokens = len(counts), counts.num_tokens - len(counts) * self._cache.layout.unit_tokens
        tiers = tuple(self._tier(tier) for tier in self._learning.tiers)
        buckets = tuple(self._learning.times.statistics(self._cache.layout.unit_tokens))
        return EvictionStatistics(tiers, buckets, num_runs, num_tokens * TOKEN_BYTES + num_runs * RUN_BYTES)

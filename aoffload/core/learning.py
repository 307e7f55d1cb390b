"""Learned eviction of a ledger: what was asked for, how often and how long ago, and the orders that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .cache import PrefixCache
from .eviction import EvictionOrder, LeastRecentlyUsed
from .groups import Layout
from .hit_counts import CountedRun, HitCounts
from .hops import Tier
from .learned_order import LearnedOrder
from .owners import Holding
from .records import Run
from .returns import NUM_CLASSES, ReturnTimes, class_of
from .shadows import Guard, sample_of
from .tokens import TokenSequence

__all__ = ["Learning"]

REMEMBERED = 8
"""How often units were asked for is remembered for this many times the units that the host holds."""


class Learning:
    def __init__(self, layout: Layout, capacities: dict[Tier, int]) -> None:
        """`capacities`: blocks of each tier whose eviction learns."""
        units = {tier: max(1, num_blocks // layout.width) for tier, num_blocks in capacities.items()}
        self._times = ReturnTimes(units[Tier.HOST])
        self._guards = {tier: Guard(self._times, size) for tier, size in units.items()}
        self._unit_tokens = unit_tokens = layout.unit_tokens
        most = REMEMBERED * max(units.values()) * unit_tokens
        self._forgotten: Callable[[CountedRun], object] = _nobody
        self._counts = HitCounts(layout, most, unit_tokens, self)
        self.tiers = tuple(units)
        self.ruled = self._ruled()
        """The tiers that follow what was learned now."""

    def new_order(self, tier: Tier) -> EvictionOrder:
        guard = self._guards.get(tier)
        return LeastRecentlyUsed() if guard is None else LearnedOrder(self._times, guard)

    def _ruled(self) -> tuple[Tier, ...]:
        return tuple([tier for tier, guard in self._guards.items() if guard.is_learned])

    # -- what requests ask for ------------------------------------------------------------------------------------

    def seen(self, holding: Holding, first: int, stop: int) -> Sequence[CountedRun]:
        """`holding` asks for units `[first, stop)`. Returns the runs of the history."""
        if first >= stop:
            return ()
        times, by_class = self._times, [0] * NUM_CLASSES
        now, path = times.clock, self._counts.path(holding.sequence, first, stop)
        for counted in path:
            num_uses, num_units = counted.num_uses, counted.stop - counted.start
            if num_uses:
                times.returned(class_of(num_uses), counted.last_asked, num_units)
                by_class[class_of(num_uses + 1)] += num_units
            else:
                by_class[0] += num_units
            counted.used(now)
        if sample := sample_of(path):
            for guard in self._guards.values():
                guard.asked(sample)
            self.ruled = self._ruled()
        times.asked(by_class)
        self._counts.trim()
        if not first and path[0].num_uses > 1:
            holding.asked_for(_uses(path))
        return path

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        for guard in self._guards.values():
            guard.was_split(counted, head)

    def was_forgotten(self, counted: CountedRun) -> None:
        for guard in self._guards.values():
            guard.was_forgotten(counted)
        self._forgotten(counted)

    def when_forgotten(self, forgotten: Callable[[CountedRun], object]) -> None:
        """Have `forgotten` called with each run that the history forgets."""
        self._forgotten = forgotten

    def trim(self) -> None:
        """Forget what is too much."""
        self._counts.trim()

    @property
    def num_runs(self) -> int:
        """Runs of the history."""
        return len(self._counts)

    @property
    def num_tokens(self) -> int:
        """Tokens of the history."""
        return self._counts.num_tokens - self.num_runs * self._unit_tokens

    def shadow_hits(self, tier: Tier) -> tuple[float, float]:
        """Of the guard's two small caches: that which follows what was learned, and that which follows the last use."""
        return self._guards[tier].hits

    def end_of(self, sequence: TokenSequence, stop: int) -> CountedRun:
        """The run of the history that ends at unit `stop` of `sequence`."""
        return self._counts.path(sequence, 0, stop)[-1]

    # -- what the cache holds of it -------------------------------------------------------------------------------

    def mark(self, cache: PrefixCache, holding: Holding, run: Run, start: int) -> None:
        """Tell the orders how often the units from `start` on were asked for, on the path of `run`."""
        uses = holding.uses
        if not uses:
            return
        at, orders = len(uses), [(tier, cache.tiers[tier].order) for tier in self.tiers]
        current: Run | None = run
        while current is not None and current.stop > start:
            while at and uses[at - 1][0] >= current.stop:
                at -= 1
            if at and start < uses[at - 1][0] > current.start:
                cache.split(current, uses[at - 1][0])
            if at < len(uses):
                for tier, order in orders:
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

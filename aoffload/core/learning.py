"""Learned eviction of a ledger: what was asked for, how often and how long ago, and the orders that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

from .cache import PrefixCache
from .eviction import EvictionOrder, LeastRecentlyUsed
from .groups import Layout
from .hit_counts import CountedRun, HitCounts
from .learned_order import LearnedOrder
from .owners import Holding
from .plan import Tier
from .records import Run
from .returns import NUM_CLASSES, ReturnTimes, class_of
from .shadows import Guard
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
        unit_tokens = layout.unit_tokens
        most = REMEMBERED * max(units.values()) * unit_tokens
        self._counts = HitCounts(layout, most, unit_tokens, self)
        self.tiers = tuple(units)

    def new_order(self, tier: Tier) -> EvictionOrder:
        guard = self._guards.get(tier)
        return LeastRecentlyUsed() if guard is None else LearnedOrder(self._times, guard)

    @property
    def ruled(self) -> tuple[Tier, ...]:
        """The tiers that follow what was learned now."""
        return tuple(tier for tier, guard in self._guards.items() if guard.is_learned)

    # -- what requests ask for ------------------------------------------------------------------------------------

    def seen(self, holding: Holding, first: int, stop: int) -> Sequence[CountedRun]:
        """`holding` asks for units `[first, stop)`. Returns the runs of the history."""
        if first >= stop:
            return ()
        times, by_class = self._times, [0] * NUM_CLASSES
        path = self._counts.path(holding.sequence, first, stop)
        for counted in path:
            num_units = counted.run.stop - counted.run.start
            if counted.num_uses:
                times.returned(class_of(counted.num_uses), counted.last_asked, num_units)
            counted.used(times.clock)
            by_class[class_of(counted.num_uses)] += num_units
        for guard in self._guards.values():
            guard.asked(path)
        times.asked(by_class)
        self._counts.trim()
        if not first:
            holding.asked_for(_uses(path))
        return path

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        for guard in self._guards.values():
            guard.was_split(counted, head)

    def was_forgotten(self, counted: CountedRun) -> None:
        for guard in self._guards.values():
            guard.was_forgotten(counted)

    @property
    def num_runs(self) -> int:
        """Runs of the history."""
        return len(self._counts)

    def end_of(self, sequence: TokenSequence, stop: int) -> Run:
        """The run of the history that ends at unit `stop` of `sequence`."""
        return self._counts.path(sequence, 0, stop)[-1].run

    # -- what the cache holds of it -------------------------------------------------------------------------------

    def mark(self, cache: PrefixCache, holding: Holding, run: Run, start: int) -> None:
        """Tell the orders how often the units from `start` on were asked for, on the path of `run`."""
        for stop, _ in holding.uses:
            if start < stop < run.stop:
                cache.split_path(run, stop)
        uses, current = list(holding.uses), run
        before: Run | None = current
        while before is not None and before.stop > start:
            while len(uses) > 1 and uses[-2][0] >= before.stop:
                uses.pop()
            if uses and before.stop <= uses[-1][0]:
                for tier in self.tiers:
                    for part in before.parts_in(tier):
                        cache.tiers[tier].order.asked(part, uses[-1][1])
            before = before.before


def _uses(path: Sequence[CountedRun]) -> tuple[tuple[int, int], ...]:
    """(stop, number of uses): where the class changes, and at the end."""
    found: list[tuple[int, int]] = []
    for counted in path:
        if found and class_of(found[-1][1]) == class_of(counted.num_uses):
            found.pop()
        found.append((counted.run.stop, counted.num_uses))
    return tuple(found)

"""The guard of an eviction order that learns: which order would hit more is told by two small caches beside the real
one. Both see the same requests and hold a sample of what these ask for, one unit in `SAMPLED`, in that part of the
capacity. One evicts by what was learned, the other one by the last use.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from .eviction import EvictionOrder, LeastRecentlyUsed
from .hit_counts import CountedRun
from .learned_order import LearnedOrder
from .plan import Tier
from .records import Part, Run
from .returns import ReturnTimes

__all__ = ["Guard"]

SAMPLED = 16
HALF_LIFE = 1000
"""Requests after which a hit of a shadow counts half."""
LEAD = 0.01
"""By how much what was learned has to hit more before it rules again."""
BEHIND = 0.0025
"""By how much it may hit less while it rules."""


@dataclass(slots=True, eq=False)
class _Learned:
    is_learned: bool = True


@dataclass(slots=True, eq=False)
class Shadow:
    """A cache whose blocks are only counted."""

    order: EvictionOrder
    capacity: int
    parts: dict[Run, Part] = field(default_factory=dict)
    """Those with blocks, all of them in the order."""
    num_held: int = 0

    def ask(self, path: Sequence[tuple[CountedRun, int]]) -> int:
        """Hold so many blocks of each run of `path`, evicting others. Returns the blocks that it held, as far as no
        gap is before them."""
        num_hits, left, is_whole = 0, self.capacity, True
        wanted: list[tuple[CountedRun, Part, int]] = []
        for counted, size in path:
            part = self.parts.get(counted.run)
            held = 0
            if part is None:
                part = Part(Tier.HOST, 0, 1, counted.run, 0, 0)
            else:
                held = self._remove(part)
            if is_whole:
                num_hits += held
                is_whole = held == size
            if left:
                wanted.append((counted, part, min(size, left)))
                left -= min(size, left)
        self._evict(self.num_held - left)
        for counted, part, size in reversed(wanted):
            self._hold(counted, part, size)
        return num_hits

    def _hold(self, counted: CountedRun, part: Part, size: int) -> None:
        if counted.num_uses > 1:
            self.order.asked(part, counted.num_uses)
        part.append(array("i", bytes(4 * size)), part.first + size)
        self.order.add(part)
        self.parts[part.run] = part
        self.num_held += size

    def _remove(self, part: Part) -> int:
        """Returns how many blocks it had."""
        self.order.remove(part)
        del self.parts[part.run]
        held = len(part.clear())
        self.num_held -= held
        return held

    def _evict(self, num_blocks: int) -> None:
        while num_blocks > 0:
            part = self.order.oldest()
            assert part is not None, "more is held than the capacity"
            if len(part.blocks) <= num_blocks:
                num_blocks -= self._remove(part)
            else:
                part.drop_behind(part.stop - num_blocks)
                self.num_held -= num_blocks
                num_blocks = 0

    def split(self, counted: CountedRun, head: CountedRun) -> None:
        part = self.parts.get(counted.run)
        if part is None:
            return
        front = part.cut_off(head.run, part.first, part.first + num_sampled(head, head.run), 0, None)
        if front.blocks:
            self.order.add_newer(front, part)
            self.parts[head.run] = front
        if not part.blocks:
            self.order.remove(part)
            del self.parts[counted.run]

    def forget(self, run: Run) -> None:
        part = self.parts.get(run)
        if part is not None:
            self._remove(part)


def num_sampled(counted: CountedRun, run: Run) -> int:
    """Units in the sample: those whose position has the run's own rest, or those at the same position of many prompts
    would be in it together."""
    shift = SAMPLED - 1 - counted.salt % SAMPLED
    return (run.stop + shift) // SAMPLED - (run.start + shift) // SAMPLED


class Guard:
    """Which order rules in one tier: the one with more hits lately."""

    def __init__(self, times: ReturnTimes, capacity: int) -> None:
        size = max(1, capacity // SAMPLED)
        self._learned = Shadow(LearnedOrder(times, _Learned()), size)
        self._last_used = Shadow(LeastRecentlyUsed(), size)
        self._learned_hits = self._last_used_hits = 0.0
        self.is_learned = True

    @property
    def hits(self) -> tuple[float, float]:
        """Those of both lately: by what was learned, by the last use."""
        return self._learned_hits, self._last_used_hits

    def asked(self, path: Sequence[CountedRun]) -> None:
        sample = [(counted, size) for counted in path if (size := num_sampled(counted, counted.run))]
        if not sample:
            return
        keep = 0.5 ** (len(sample) / HALF_LIFE)
        self._learned_hits = self._learned_hits * keep + self._learned.ask(sample)
        self._last_used_hits = self._last_used_hits * keep + self._last_used.ask(sample)
        if self.is_learned:
            self.is_learned = self._learned_hits >= self._last_used_hits * (1 - BEHIND)
        else:
            self.is_learned = self._learned_hits > self._last_used_hits * (1 + LEAD)

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        self._learned.split(counted, head)
        self._last_used.split(counted, head)

    def was_forgotten(self, counted: CountedRun) -> None:
        self._learned.forget(counted.run)
        self._last_used.forget(counted.run)

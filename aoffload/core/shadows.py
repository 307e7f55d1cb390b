"""The guard of an eviction order that learns: which order would hit more is told by two small caches beside the real
one. Both see the same requests and hold a sample of what these ask for, one unit in `SAMPLED`, in that part of the
capacity. One evicts by what was learned, the other one by the last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .hit_counts import CountedRun
from .returns import NUM_CLASSES, ReturnTimes, class_of

__all__ = ["Guard", "sample_of"]

SAMPLED_RUNS, SAMPLED_UNITS = 2, 4
"""One run in so many is in the sample; of these, one unit in so many."""
SAMPLED = SAMPLED_RUNS * SAMPLED_UNITS
FEW = 8
"""Blocks of a sample that tells nothing."""
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
            self._hold(counted, size)
        return num_hits

    def _hold(self, counted: CountedRun, size: int) -> None:
        self.rings[0 if self._times is None else class_of(counted.num_uses)][counted] = size
        self.num_held += size

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
        self._learned_hits = self._last_used_hits = 0.0
        self.is_learned = size < FEW

    @property
    def hits(self) -> tuple[float, float]:
        """Those of both lately: by what was learned, by the last use."""
        return self._learned_hits, self._last_used_hits

    def asked(self, sample: Sequence[tuple[CountedRun, int]]) -> None:
        """`sample`: of the path that a request asks for; it may not be empty."""
        keep = 0.5 ** (len(sample) / HALF_LIFE)
        self._learned_hits = self._learned_hits * keep + self._learned.ask(sample)
        self._last_used_hits = self._last_used_hits * keep + self._last_used.ask(sample)
        self.judge()

    def judge(self) -> None:
        if self.is_learned:
            self.is_learned = self._learned_hits >= self._last_used_hits * (1 - BEHIND)
        else:
            self.is_learned = self._learned_hits > self._last_used_hits * (1 + LEAD)

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        if num_sampled(head):
            self._learned.split(counted, head)
            self._last_used.split(counted, head)

    def was_forgotten(self, counted: CountedRun) -> None:
        if num_sampled(counted):
            self._learned.forget(counted)
            self._last_used.forget(counted)

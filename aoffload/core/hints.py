"""Hints: what an engine knows of prompts that will be asked for again, such as that an agent's tool call takes a while.

A hint spares what is cached of a prompt, from its start on, until it expires or the prompt is asked for again. It pins
nothing: where only spared blocks could make room, they are evicted like all others. Hints of one category share a
record. While too few of them come true, they spare nothing.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .cache import PrefixCache
from .groups import Layout
from .hit_counts import CountedRun
from .learned_order import LearnedOrder
from .learning import Learning
from .owners import Holding
from .policy import StorePolicy
from .records import Run
from .tokens import TokenSequence

__all__ = ["AlsoLearns", "Hints"]

MAX_HINTS = 1024
"""With more, the one that expires first ends."""
MAX_CATEGORIES = 64
ENOUGH = 16
"""Hints of a category that ended before its record counts."""
TRUE_SHARE = 0.25
"""The part of the hints of a category that has to come true."""
KEPT = 0.98
"""What the ends of earlier hints weigh beside the last one, per hint."""


@dataclass(slots=True, eq=False)
class _Hint:
    sequence: TokenSequence
    expires_at: float
    category: str
    run: CountedRun
    """Of the history: what it is about ends there."""
    spared: int = 0
    """It spares the units before this one, which were cached when it was given."""


@dataclass(slots=True, eq=False)
class _Record:
    num_ended: float = 0.0
    num_true: float = 0.0

    def ended(self, *, is_true: bool) -> None:
        self.num_ended = self.num_ended * KEPT + 1
        self.num_true = self.num_true * KEPT + is_true

    @property
    def is_good(self) -> bool:
        return self.num_ended < ENOUGH * KEPT or self.num_true >= TRUE_SHARE * self.num_ended


class Hints:
    def __init__(self, cache: PrefixCache, learning: Learning) -> None:
        self._cache = cache
        self._learning = learning
        self._by_run: dict[CountedRun, _Hint] = {}
        self._by_expiry: list[_Hint] = []
        """The first to expire in front."""
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_expiry)

    def hint(self, sequence: TokenSequence, expires_at: float, category: str) -> int:
        """Spare what is cached of `sequence`. Returns the units that are spared now."""
        stop = sequence.num_tokens // self._cache.layout.unit_tokens
        if not stop:
            return 0
        run = self._learning.end_of(sequence, stop)
        if (before := self._by_run.get(run)) is not None:
            self._end(before)
        hint = _Hint(sequence, expires_at, category, run)
        self._by_run[run] = hint
        insort(self._by_expiry, hint, key=_expiry)
        if self._record(category).is_good:
            hint.spared = self._change(sequence, stop, 1)
        if len(self._by_expiry) > MAX_HINTS:
            self._end(self._by_expiry[0])
        return hint.spared

    def _record(self, category: str) -> _Record:
        found = self._records.setdefault(category, _Record())
        self._records.move_to_end(category)
        if len(self._records) > MAX_CATEGORIES:
            self._records.popitem(last=False)
        return found

    @property
    def next_lapse(self) -> float:
        return self._by_expiry[0].expires_at if self._by_expiry else math.inf

    def lapse(self, now: float) -> None:
        while self._by_expiry and self._by_expiry[0].expires_at <= now:
            hint = self._by_expiry[0]
            self._record(hint.category).ended(is_true=False)
            self._end(hint)

    def asked(self, path: Sequence[CountedRun]) -> None:
        """A request asks for `path`: hints about its beginnings have come true."""
        for counted in path if self._by_run else ():
            if (hint := self._by_run.get(counted)) is not None:
                self._record(hint.category).ended(is_true=True)
                self._end(hint)

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._by_run.clear()
        self._by_expiry.clear()

    def _end(self, hint: _Hint) -> None:
        del self._by_run[hint.run]
        self._by_expiry.remove(hint)
        self._change(hint.sequence, hint.spared, -1)

    def _change(self, sequence: TokenSequence, stop: int, change: int) -> int:
        """Let one hint more, or one less, spare what is cached of `sequence` before unit `stop`. Returns the units
        cached in a row."""
        cache, reached = self._cache, 0
        for found, agreed in list(cache.index.walk(sequence, stop)):
            run = cache.cut(found, agreed)
            for tier in self._learning.tiers:
                order = cache.tiers[tier].order
                assert isinstance(order, LearnedOrder)
                for part in run.parts_in(tier):
                    order.hinted(part, change)
            reached = agreed
        return reached


@dataclass(slots=True, frozen=True)
class AlsoLearns:
    """The store policy of a ledger whose eviction learns."""

    policy: StorePolicy
    learning: Learning
    hints: Hints

    @property
    def num_watermark_blocks(self) -> int:
        return self.policy.num_watermark_blocks

    def for_ledger(self, layout: Layout, num_device_blocks: int) -> StorePolicy:
        return self

    def seen(self, holding: Holding, first: int, stop: int) -> None:
        self.policy.seen(holding, first, stop)
        self.hints.asked(self.learning.seen(holding, first, stop))

    def wanted_stop(self, holding: Holding) -> int:
        return self.policy.wanted_stop(holding)


def _expiry(hint: _Hint) -> float:
    return hint.expires_at

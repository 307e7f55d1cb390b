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

from .._kernel.cache import PrefixCache
from .._kernel.moves import Moves
from .._kernel.records import Run
from .._kernel.requests import LedgerRequest
from .._kernel.tokens import TokenSequence
from .counts import CountedRun
from .learned import Learning, Rulings
from .status import HintEnd, HintEnded, HintGiven

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
    hint_id: int
    sequence: TokenSequence
    stop: int
    """It is about the units before this one."""
    expires_at: float
    category: str
    about: CountedRun
    """Of the history: what it is about ends there, or ended there when the history forgot it."""
    last: Run | None = None
    """Of the cache: it spares this run and all before it, which were cached when it was given."""


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
    def __init__(self, cache: PrefixCache, learning: Learning, rulings: Rulings, moves: Moves) -> None:
        self._cache = cache
        self._learning = learning
        self._rulings = rulings
        self._moves = moves
        self._by_run: dict[CountedRun, _Hint] = {}
        self._forgotten: dict[_Hint, None] = {}
        """Those about what the history has forgotten: they are found by their tokens."""
        self._by_expiry: list[_Hint] = []
        """The first to expire in front."""
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._last_id = 0
        learning.when_forgotten = self._forgot

    def __len__(self) -> int:
        return len(self._by_expiry)

    def hint(self, sequence: TokenSequence, expires_at: float, category: str) -> int:
        """Spare what is cached of `sequence`. Returns the units that are spared now."""
        stop = sequence.num_tokens // self._cache.layout.unit_tokens
        if not stop:
            return 0
        about = self._learning.counts.path(sequence, 0, stop)[-1]
        for before in self._about(sequence, stop, (about,)):
            if before.stop == stop:
                self._end(before, HintEnd.DROPPED)
        self._last_id += 1
        hint = self._by_run[about] = _Hint(self._last_id, sequence, stop, expires_at, category, about)
        insort(self._by_expiry, hint, key=lambda hint: hint.expires_at)
        if self._record(category).is_good:
            hint.last = self._last_cached(sequence, stop)
        spared = 0 if hint.last is None else hint.last.stop
        self._change(hint.last, 1)
        self._moves.note(HintGiven(hint.hint_id, category, spared * self._cache.layout.unit_tokens))
        if len(self._by_expiry) > MAX_HINTS:
            self._end(self._by_expiry[0], HintEnd.DROPPED)
        self._learning.counts.trim()
        return spared

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
            self._end(hint, HintEnd.LAPSED)

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        """`request` asks for units `[first, stop)`: learn from that. Hints about beginnings of its tokens have come
        true."""
        path = self._learning.seen(request, first, stop)
        for hint in self._about(request.sequence, stop, path) if self._by_expiry else ():
            self._record(hint.category).ended(is_true=True)
            self._end(hint, HintEnd.TRUE)
        if path:
            self._rulings.look()

    def _about(self, sequence: TokenSequence, stop: int, path: Sequence[CountedRun]) -> list[_Hint]:
        """The hints about `path`, or about another beginning of `sequence` before unit `stop`."""
        found = [hint for counted in path if (hint := self._by_run.get(counted)) is not None]
        unit_tokens = self._cache.layout.unit_tokens
        for hint in self._forgotten:
            if hint.stop <= stop and sequence.agrees(hint.sequence, hint.stop * unit_tokens):
                found.append(hint)
        return found

    def _forgot(self, counted: CountedRun) -> None:
        if (hint := self._by_run.pop(counted, None)) is not None:
            self._forgotten[hint] = None

    def clear(self) -> None:
        """Nothing is cached any more."""
        dropped = self._by_expiry
        self._by_run, self._forgotten, self._by_expiry = {}, {}, []
        for hint in dropped:
            self._moves.note(HintEnded(hint.hint_id, hint.category, HintEnd.DROPPED))

    def _end(self, hint: _Hint, end: HintEnd) -> None:
        if self._by_run.pop(hint.about, None) is None:
            del self._forgotten[hint]
        self._by_expiry.remove(hint)
        self._change(hint.last, -1)
        self._moves.note(HintEnded(hint.hint_id, hint.category, end))

    def _last_cached(self, sequence: TokenSequence, stop: int) -> Run | None:
        """The run in which what is cached of `sequence`, at most up to unit `stop`, ends."""
        last = None
        for found, agreed in list(self._cache.index.walk(sequence, stop)):
            last = self._cache.cut(found, agreed)
        return last

    def _change(self, last: Run | None, change: int) -> None:
        """Let one hint more, or one less, spare `last` and all runs before it.

        While a hint spares them, `before` leads to the same runs again, or to what became of them: to both parts of one
        that was split, to what two have become that all hints spare alike, and past one that was evicted, of which
        nothing is left. So none keeps a hint that has ended, nor loses one that it has: no tail has more than its head.
        """
        while last is not None:
            for tier, order in self._learning.orders.items():
                for part in last.parts_in(tier):
                    order.hinted(part, change)
            last = last.before

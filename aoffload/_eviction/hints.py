"""Hints: prompts that the engine expects to be requested again, for example when the tool call of an agent returns.

A hint spares the cached part of a prompt until the hint expires or the prompt is requested again. A hint pins nothing:
if only spared blocks are left to evict, they are evicted like all others. The hints of one category share a record,
which counts how many of them have come true. While too few of them come true, they spare nothing.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .._kernel.cache import PrefixCache
from .._kernel.moves import Moves
from .._kernel.records import LedgerRequest, Run
from .._kernel.tokens import TokenSequence
from .counts import CountedRun
from .learned import Learning, Rulings
from .status import HintEnd, HintEnded, HintGiven

MAX_HINTS = 1024
"""Maximum hints in force. One more hint ends the hint that expires first."""
MAX_CATEGORIES = 64
ENOUGH = 16
"""The record of a category counts once this many of its hints have ended."""
TRUE_SHARE = 0.25
"""Minimum share of the hints of a category that has to come true."""
KEPT = 0.98
"""Each hint that ends multiplies the counts of the hints before it by this, so that older hints count less."""


@dataclass(slots=True, eq=False)
class _Hint:
    hint_id: int
    sequence: TokenSequence
    stop: int
    """The hint is about the units before this unit."""
    expires_at: float
    category: str
    about: CountedRun
    """The run of the history that ends at `stop`. The history may have forgotten the run since."""
    last: Run | None = None
    """The last run of the prompt that was cached when the hint was given. The hint spares this run and all runs before
    it. None: it spares nothing."""


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
        """Hints whose run the history has forgotten. They are found by their tokens."""
        self._by_expiry: list[_Hint] = []
        """All hints in force, the first to expire first."""
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._last_id = 0
        learning.when_forgotten = self._forgot

    def __len__(self) -> int:
        return len(self._by_expiry)

    def hint(self, sequence: TokenSequence, expires_at: float, category: str) -> int:
        """Spare the cached part of `sequence`. Returns the number of units that are spared now."""
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
        """Learn that `request` requests units `[first, stop)`. Hints about a prefix of its tokens have come true, and
        end."""
        path = self._learning.seen(request, first, stop)
        for hint in self._about(request.sequence, stop, path) if self._by_expiry else ():
            self._record(hint.category).ended(is_true=True)
            self._end(hint, HintEnd.TRUE)
        if path:
            self._rulings.look()

    def _about(self, sequence: TokenSequence, stop: int, path: Sequence[CountedRun]) -> list[_Hint]:
        """The hints about runs of `path`, and those about a prefix of `sequence`, up to unit `stop`, that the history
        has forgotten."""
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
        """Drop all hints, because nothing is cached any more."""
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
        """The last cached run of `sequence` before unit `stop`. Splits a cached run whose later tokens differ."""
        last = None
        for found, agreed in list(self._cache.index.walk(sequence, stop)):
            last = self._cache.cut(found, agreed)
        return last

    def _change(self, last: Run | None, change: int) -> None:
        """Add a hint to `last` and all runs before it (`change` is 1), or remove one (-1).

        When the hint ends, `before` leads from `last` to the same runs as when it was given, with three exceptions: a
        run that was split is now two runs; two runs that were merged are one (only runs with the same hints are
        merged); a run that was evicted is missing. So no run keeps a hint that has ended or loses a hint in force, and
        a suffix never has more hints than its prefix.
        """
        while last is not None:
            for tier, order in self._learning.orders.items():
                for part in last.parts_in(tier):
                    order.hinted(part, change)
            last = last.before

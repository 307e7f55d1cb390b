"""Changes of the cached blocks, as the ledger reports them, in the order of its calls.

Nothing is hashed and nothing is copied here: a change refers to the immutable data that identify its blocks.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import attrs

from aoffload import KeySpan, Tier
from aoffload._kernel.records import Part, Run
from aoffload.ledger import Root

from ..._extensions.assembly import AnyLedger

if TYPE_CHECKING:
    from aoffload._common.prefix import Hasher


class Kind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"


@attrs.frozen(eq=False)
class Change:
    """Units `[start, stop)` of a run became cached in `tier`, or were dropped there, in every group of `component`."""

    kind: Kind
    tier: Tier
    component: int
    start: int
    stop: int
    run_start: int
    tokens: bytes | memoryview
    """Token ids of the run, from `run_start` on."""
    spans: tuple[KeySpan, ...]
    hash_before: Hasher
    """The running hash of everything before the run."""
    root: Root

    @classmethod
    def of(cls, kind: Kind, tier: Tier, component: int, run: Run, start: int, stop: int) -> Change:
        return cls(kind, tier, component, start, stop, run.start, run.tokens, run.spans, run.hash_before, run.root)


@attrs.frozen
class Cleared:
    """All tiers were emptied, or the changes after it describe everything that can be found."""


Told: TypeAlias = Change | Cleared


class Changes:
    """Watches a ledger and queues its changes for a publisher, which may run in another thread.

    The queue's limit is about `most` changes, or twice as many as describe the whole cache. If the publisher falls
    further behind, the queue is replaced by a description of the whole cache.
    """

    def __init__(self, ledger: AnyLedger, most: int, wake: Callable[[], None]) -> None:
        self._ledger = ledger
        self._most = self._limit = most
        self._wake = wake
        self._told: deque[Told] = deque()
        self._is_signalled = False
        self._is_behind = False
        """A subscriber has missed batches that are no longer kept."""
        self._epoch = ledger.cache.epoch
        self._is_findable = ledger.weights.is_findable

    def begin(self) -> None:
        """Queue the whole cache, and each change from now on."""
        self._epoch = self._ledger.cache.epoch
        self._ledger.watch(self)
        self._ledger.weights.when_changed.append(self.tell_anew)
        self.tell_anew()

    def end(self) -> None:
        """Stop watching, and queue that the cache is empty."""
        self._ledger.unwatch(self)
        if self.tell_anew in (calls := self._ledger.weights.when_changed):
            calls.remove(self.tell_anew)
        self._told.append(Cleared())

    # -- called by the ledger -------------------------------------------------------------------------------------

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        if part.run.epoch != self._epoch or not self._is_findable(part.run.root):
            return  # a reset, or a change of the weights' epoch, has already made it unfindable
        if self._is_behind or len(self._told) >= self._limit:
            self.tell_anew()
            return
        self._tell(part, Kind.REMOVED, first, min(stop, part.first))
        self._tell(part, Kind.REMOVED, max(first, part.stop), stop)
        self._tell(part, Kind.STORED, part.first, min(part.stop, first))
        self._tell(part, Kind.STORED, max(part.first, stop), part.stop)
        self._signal()

    def all_cleared(self, epoch: int) -> None:
        self._epoch = epoch
        self._told.clear()
        self._told.append(Cleared())
        self._signal()

    def tell_anew(self) -> None:
        """Replace the queue: first that the cache is empty, then the whole cache, prefixes first."""
        self._is_behind = False
        self._told.clear()
        self._told.append(Cleared())
        for run in sorted(self._ledger.cache.index.runs.values(), key=lambda run: run.start):
            for part in run.parts if self._is_findable(run.root) else ():
                self._tell(part, Kind.STORED, part.first, part.stop)
        self._limit = max(self._most, 2 * len(self._told))  # otherwise each change would replace the queue again
        self._signal()

    def _tell(self, part: Part, kind: Kind, start: int, stop: int) -> None:
        if start >= stop:
            return
        run = part.run
        if not self._ledger.cache.tiers[part.tier].is_outside:
            self._told.append(Change.of(kind, part.tier, part.component, run, start, stop))

    def _signal(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            self._wake()

    @property
    def is_empty(self) -> bool:
        return not self._told

    # -- called by the publisher ----------------------------------------------------------------------------------

    def expect(self) -> None:
        """Have the next change wake the publisher again. Call it before `take`, or the last change might stay in the
        queue."""
        self._is_signalled = False

    def take(self, most: int) -> list[Told]:
        """Take the oldest changes, at most `most`."""
        taken: list[Told] = []
        while len(taken) < most and (told := self._next()) is not None:
            taken.append(told)
        return taken

    def _next(self) -> Told | None:
        try:
            return self._told.popleft()
        except IndexError:  # also if the other thread has just cleared it
            return None

    def fall_behind(self) -> None:
        """A subscriber has missed batches that are no longer kept. The next change queues the whole cache."""
        self._is_behind = True

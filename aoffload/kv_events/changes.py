"""What becomes cached and what is no more, as the ledger tells of it, in the order of its calls.

Nothing is hashed and nothing copied here: a change refers to what identifies the blocks, none of which ever changes.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import attrs

from aoffload import KeySpan, Ledger, Tier, WrongState
from aoffload.core.records import Part
from aoffload.ledger import Root

if TYPE_CHECKING:
    from aoffload.prefix import Hasher

__all__ = ["Change", "Changes", "Cleared", "Kind", "Told"]


class Kind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"


@attrs.frozen(eq=False)
class Change:
    """Units `[start, stop)` of a run became cached in `tier`, in every group of `band`, or are no more."""

    kind: Kind
    tier: Tier
    band: int
    start: int
    stop: int
    run_start: int
    tokens: bytes
    """Of the run, from `run_start` on."""
    spans: tuple[KeySpan, ...]
    hash_before: Hasher
    """Of everything before the run."""
    root: Root


@attrs.frozen
class Cleared:
    """Nothing is cached any more, in any tier."""


Told: TypeAlias = Change | Cleared


class Changes:
    """Watches a ledger; somebody else takes what it was told, in another thread if need be.

    Holds about `most` of them at most, or twice what is cached: whoever is slower than that is told all anew.
    """

    def __init__(self, ledger: Ledger, most: int, wake: Callable[[], None]) -> None:
        self._ledger = ledger
        self._most = self._limit = most
        self._wake = wake
        self._told: deque[Told] = deque()
        self._is_signalled = False
        self._is_behind = False
        """Somebody has missed more than can be told again."""
        self._epoch = ledger.cache.epoch

    def check_alone(self) -> None:
        """A ledger has one watcher: another one would be told no more."""
        if any(tier.watcher is not None for tier in self._ledger.cache.tiers):
            raise WrongState("publish: somebody watches this ledger already")

    def begin(self) -> None:
        """Tell of what is cached now, and of each change from now on."""
        self._epoch = self._ledger.cache.epoch
        self._ledger.watch(self)
        self.tell_anew()

    def end(self) -> None:
        """What was cached is of no use to anybody any more."""
        self._ledger.watch(None)
        self._told.append(Cleared())

    # -- told by the ledger ---------------------------------------------------------------------------------------

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        if part.run.epoch != self._epoch:
            return  # a reset has made it unfindable before
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
        """Forget what was not taken yet: nothing is cached, and then all that is, prefixes first."""
        self._is_behind = False
        self._told.clear()
        self._told.append(Cleared())
        for run in sorted(self._ledger.cache.index.runs.values(), key=lambda run: run.start):
            for part in run.parts:
                self._tell(part, Kind.STORED, part.first, part.stop)
        self._limit = max(self._most, 2 * len(self._told))  # or it would be told anew with each change
        self._signal()

    def _tell(self, part: Part, kind: Kind, start: int, stop: int) -> None:
        if start >= stop:
            return
        run = part.run
        if not self._ledger.cache.tiers[part.tier].is_outside:
            told = Change(
                kind, part.tier, part.band, start, stop, run.start, run.tokens, run.spans, run.hash_before, run.root
            )  # fmt: skip
            self._told.append(told)

    def _signal(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            self._wake()

    # -- taken by whoever publishes -------------------------------------------------------------------------------

    def expect(self) -> None:
        """From here on a change wakes again. To be called before taking, or the last one might never be taken."""
        self._is_signalled = False

    def take(self, most: int) -> list[Told]:
        """The oldest of what was not taken yet."""
        taken: list[Told] = []
        while len(taken) < most and (told := self._next()) is not None:
            taken.append(told)
        return taken

    def _next(self) -> Told | None:
        try:
            return self._told.popleft()
        except IndexError:  # also if it was cleared just now, in the other thread
            return None

    def fall_behind(self) -> None:
        """Somebody has missed what nobody can repeat: with the next change, all is told anew."""
        self._is_behind = True

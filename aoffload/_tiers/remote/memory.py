"""A cache of the store's answers about cells, and the cells that have to be removed from the store.

Answers expire, because other processes change the store."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from itertools import chain

import attrs

from .plans import CellLabel

MAX_CELLS = 2**16


class Known(enum.Enum):
    """The last known state of a cell; the value is the number of seconds for which it is remembered."""

    PRESENT = 600.0
    """The cell was stored or seen, so it need not be stored again."""
    ABSENT = 1.0
    """The store does not have it, so the store need not be asked again."""
    CORRUPT = 60.0
    """The object in the store is not this cell: it is neither requested nor loaded, and the next store removes it
    first."""


@attrs.frozen
class Memory:
    known: Known
    until_s: float


class CellMemory:
    """Remembers at most `MAX_CELLS` cells; the oldest is forgotten first. Called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: dict[tuple[int, bytes], Memory] = {}
        """In the order in which they were recorded."""

    def note(self, label: CellLabel, known: Known, now: float) -> None:
        key = label.component, label.digest
        with self._lock:
            self._memories.pop(key, None)
            self._memories[key] = Memory(known, now + known.value)
            if len(self._memories) > MAX_CELLS:
                del self._memories[next(iter(self._memories))]

    def note_seen(self, label: CellLabel, is_there: bool, now: float) -> None:
        """Note whether the store has an object of that name. That does not make a corrupt object right."""
        if self.of(label, now) is not Known.CORRUPT:
            self.note(label, Known.PRESENT if is_there else Known.ABSENT, now)

    def of(self, label: CellLabel, now: float) -> Known | None:
        with self._lock:
            found = self._memories.get((label.component, label.digest))
            if found is None:
                return None
            if found.until_s > now:
                return found.known
            del self._memories[label.component, label.digest]
        return None

    def __len__(self) -> int:
        return len(self._memories)


# -- removals --------------------------------------------------------------------------------------------------------
#
# Cells whose KV is wrong. Until the store has removed such a cell, this process neither loads nor stores it. Objects
# that this process put for the cell before its invalidation are never loaded again.
#
# A put that has failed for this process may still be under way, because a proxy or a server holds it back, and may
# arrive after the removal. So every object has the number of the put that wrote it, and an invalidation revokes all
# numbers so far. Other processes that share the store do not know the revoked numbers. So a removal is repeated after
# a failed put.

AGAIN_S = 10.0
"""Minimum seconds from a removal to its repetition. If more time has passed since the put failed, the repetition comes
after that much time."""
DOUBT_S = 900.0
"""Seconds after which a failed put is assumed never to arrive, so that the removal is not repeated."""

Key = tuple[int, bytes]


def key_of(label: CellLabel) -> Key:
    return label.component, label.digest


class Removals:
    """The cells to remove. Only one thread at a time removes a cell, and none while a store of it is under way, because
    the store would bring the cell back. Called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Key, CellLabel] = {}
        self._taken: set[Key] = set()
        self._written: dict[Key, int] = {}
        """By cell: the number of stores under way that write it."""
        self._num_stores = 0
        self._revoked: dict[Key, int] = {}
        """By cell: puts with a smaller number wrote wrong KV."""
        self._all_revoked = 0
        """The same for all cells that `_revoked` does not hold."""
        self._in_doubt: dict[Key, float] = {}
        """By cell: the time at which a put has last failed. That put may arrive later."""
        self._again: dict[Key, tuple[CellLabel, float]] = {}
        """Removed cells, each with the time of its next removal. Until then these cells are used."""
        self.has_lost_count = False
        """More cells had to be removed than can be remembered, so no cell of the store can be trusted any more."""

    def add(self, labels: Iterable[CellLabel]) -> None:
        """Record that all KV which was stored for these cells so far is wrong."""
        with self._lock:
            for label in labels:
                key = key_of(label)
                self._waiting[key] = label
                self._again.pop(key, None)
                self._revoked[key] = self._num_stores
            if len(self._revoked) > MAX_CELLS:
                self._all_revoked = self._num_stores
                self._revoked.clear()
            self.has_lost_count = self.has_lost_count or len(self._waiting) > MAX_CELLS

    def holds(self, label: CellLabel) -> bool:
        """Whether this cell must not be used."""
        return self.has_lost_count or key_of(label) in self._waiting

    def has_revoked(self, label: CellLabel, number: int) -> bool:
        """Whether the put of this cell with this number wrote wrong KV."""
        return number < max(self._all_revoked, self._revoked.get(key_of(label), 0))

    @property
    def waiting(self) -> list[CellLabel]:
        """The cells that are not removed yet."""
        with self._lock:
            return list(self._waiting.values())

    def take(self, may_take: Callable[[CellLabel], bool], now: float) -> CellLabel | None:
        """A cell to remove now; call `done` for it afterwards. None: there is nothing to remove now."""
        if not self._waiting and not self._again:
            return None
        with self._lock:
            due = (label for label, due_s in self._again.values() if due_s <= now)
            for label in chain(self._waiting.values(), due):
                key = key_of(label)
                if key not in self._taken and not self._written.get(key) and may_take(label):
                    self._taken.add(key)
                    return label
        return None

    def done(self, label: CellLabel, is_removed: bool, now: float) -> None:
        key = key_of(label)
        with self._lock:
            self._taken.discard(key)
            if not is_removed:
                return
            self._waiting.pop(key, None)
            self._again.pop(key, None)
            since_s = now - self._in_doubt.get(key, now - DOUBT_S)
            if since_s < DOUBT_S:
                self._again[key] = label, now + max(AGAIN_S, since_s)
            else:
                self._in_doubt.pop(key, None)

    def begin_store(self, label: CellLabel) -> int | None:
        """The number of a new store of this cell. Call `end_store` when it is over. None: it may not begin. Read its KV
        after this call, because a later `add` of the cell revokes the number."""
        key = key_of(label)
        with self._lock:
            if self.has_lost_count or key in self._waiting:
                return None
            self._written[key] = self._written.get(key, 0) + 1
            self._num_stores += 1
            return self._num_stores - 1

    def end_store(self, label: CellLabel) -> None:
        key = key_of(label)
        with self._lock:
            self._written[key] -= 1
            if not self._written[key]:
                del self._written[key]

    def doubt(self, label: CellLabel, now: float) -> None:
        """A put of this cell has failed, but may still arrive."""
        key = key_of(label)
        with self._lock:
            self._in_doubt.pop(key, None)
            self._in_doubt[key] = now
            if len(self._in_doubt) > MAX_CELLS:
                del self._in_doubt[next(iter(self._in_doubt))]

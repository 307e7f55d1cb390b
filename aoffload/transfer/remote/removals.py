"""Cells whose KV is wrong: until the store has let go of them, nobody here loads or stores them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ...core.plan import CellLabel

__all__ = ["Removals"]

MAX_CELLS = 2**16

Key = tuple[int, bytes]


def key_of(label: CellLabel) -> Key:
    return label.band, label.digest


class Removals:
    """What is to be removed. One thread has a cell at a time, and none while a store of it is under way, which would
    bring it back. Called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Key, CellLabel] = {}
        self._taken: set[Key] = set()
        self._written: dict[Key, int] = {}
        """Cells that stores under way write, and how many do."""
        self.has_lost_count = False
        """More had to be removed than can be remembered: what the store has can no longer be trusted."""

    def add(self, labels: Iterable[CellLabel]) -> None:
        with self._lock:
            for label in labels:
                self._waiting[key_of(label)] = label
            self.has_lost_count = self.has_lost_count or len(self._waiting) > MAX_CELLS

    def holds(self, label: CellLabel) -> bool:
        """Whether this cell is not to be used."""
        return self.has_lost_count or key_of(label) in self._waiting

    @property
    def waiting(self) -> list[CellLabel]:
        """The cells that are not removed yet."""
        with self._lock:
            return list(self._waiting.values())

    def take(self, may_take: Callable[[CellLabel], bool]) -> CellLabel | None:
        """A cell to remove now: call `done` for it."""
        if not self._waiting:
            return None
        with self._lock:
            for key, label in self._waiting.items():
                if key not in self._taken and not self._written.get(key) and may_take(label):
                    self._taken.add(key)
                    return label
        return None

    def done(self, label: CellLabel, is_removed: bool) -> None:
        with self._lock:
            self._taken.discard(key_of(label))
            if is_removed:
                self._waiting.pop(key_of(label), None)

    def begin_store(self, label: CellLabel) -> bool:
        """Whether a store of this cell may begin: call `end_store` then."""
        key = key_of(label)
        with self._lock:
            if self.has_lost_count or key in self._waiting:
                return False
            self._written[key] = self._written.get(key, 0) + 1
        return True

    def end_store(self, label: CellLabel) -> None:
        key = key_of(label)
        with self._lock:
            self._written[key] -= 1
            if not self._written[key]:
                del self._written[key]

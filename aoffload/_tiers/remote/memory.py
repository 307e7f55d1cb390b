"""Answers of the store about cells, remembered for a while. They expire, because other processes change the store."""

from __future__ import annotations

import enum
import threading

import attrs

from .plans import CellLabel

MAX_CELLS = 2**16


class Known(enum.Enum):
    """What is known of a cell; the value is the number of seconds for which it is remembered."""

    PRESENT = 600.0
    """It was stored or seen, so it need not be stored again."""
    ABSENT = 1.0
    """The store does not have it, so the store need not be asked again."""
    CORRUPT = 60.0
    """The object in the store is not this cell: it is neither asked for nor loaded, and the next store removes it
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
        """In the order in which they were noted."""

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

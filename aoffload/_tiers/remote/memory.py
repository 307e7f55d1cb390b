"""What is known of cells without asking the store: bounded, and forgotten again, because others change the store."""

from __future__ import annotations

import enum
import threading

import attrs

from .plans import CellLabel

MAX_CELLS = 2**16


class Known(enum.Enum):
    """And for how many seconds."""

    PRESENT = 600.0
    """It was stored or seen: storing it again would be for nothing."""
    ABSENT = 1.0
    """The store does not have it: asking again would be for nothing."""
    CORRUPT = 60.0
    """What the store has is not this cell: nothing is asked or loaded, and the next store removes it first."""


@attrs.frozen
class Memory:
    known: Known
    until_s: float


class CellMemory:
    """At most `MAX_CELLS` cells, the oldest forgotten first. Called by any thread."""

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
        """The store says whether it has an object of that name, which does not make a corrupt one right."""
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

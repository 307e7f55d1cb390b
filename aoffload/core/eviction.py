"""The order in which unpinned runs lose their blocks: a policy over runs, one for each tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .index import Part

__all__ = ["EvictionOrder", "LeastRecentlyUsed"]


class EvictionOrder(Protocol):
    """Holds every unpinned part of a tier that has blocks. The oldest loses its tail first."""

    def add(self, part: Part) -> None:
        """`part` was just let go of."""
        ...

    def add_newer(self, part: Part, than: Part) -> None:
        """`part` was cut off the front of `than`: it must outlive it, or its tail could not be reached any more."""
        ...

    def add_back(self, part: Part) -> None:
        """`part`, which has a `last_use`, was only read by a job: its place is what it was."""
        ...

    def remove(self, part: Part) -> None: ...

    def oldest(self) -> Part | None: ...

    def __iter__(self) -> Iterator[Part]: ...


class LeastRecentlyUsed:
    """Oldest release first, as a ring through the parts themselves, in the order of their `last_use`."""

    def __init__(self) -> None:
        self._ring = Part(None, 0, 0)  # type: ignore[arg-type]
        self._ring.older = self._ring.newer = self._ring
        self._num_uses = 0

    def add(self, part: Part) -> None:
        self._num_uses += 1
        part.last_use = self._num_uses
        self._link(part, self._ring.older)

    def add_newer(self, part: Part, than: Part) -> None:
        part.last_use = than.last_use
        self._link(part, than)

    def add_back(self, part: Part) -> None:
        """Looked for from both ends: what was about to be evicted is near the one, what is hot near the other."""
        old, new = self._ring.newer, self._ring.older
        while True:
            assert old is not None and new is not None
            if old is self._ring or old.last_use > part.last_use:
                return self._link(part, old.older)
            if new is self._ring or new.last_use <= part.last_use:
                return self._link(part, new)
            old, new = old.newer, new.older

    def _link(self, part: Part, older: Part | None) -> None:
        assert older is not None
        newer = older.newer
        assert newer is not None
        part.older, part.newer = older, newer
        older.newer = newer.older = part

    def remove(self, part: Part) -> None:
        older, newer = part.older, part.newer
        assert older is not None and newer is not None, "not in the order"
        older.newer, newer.older = newer, older
        part.older = part.newer = None

    def oldest(self) -> Part | None:
        first = self._ring.newer
        return None if first is self._ring else first

    def __iter__(self) -> Iterator[Part]:
        part = self._ring.newer
        while part is not None and part is not self._ring:
            yield part
            part = part.newer

"""The order in which unpinned runs lose their blocks: a policy over runs, one for each tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .records import Part


class EvictionOrder(Protocol):
    """The eviction order of one tier. It has every unpinned part with blocks; the oldest one loses its tail first."""

    def add(self, part: Part) -> None:
        """`part` was just unpinned."""
        ...

    def add_newer(self, part: Part, than: Part) -> None:
        """Insert `part` right after `than`, to be evicted after it. `part` is the head of a split and `than` its tail:
        the tail is evicted first, because it could not be found without its head."""
        ...

    def add_back(self, part: Part) -> None:
        """Reinsert `part` at its old place, by `last_use`: it was pinned, but not used."""
        ...

    def remove(self, part: Part) -> None: ...

    def oldest(self) -> Part | None: ...

    def __iter__(self) -> Iterator[Part]: ...


class LeastRecentlyUsed:
    """The part that was released first is evicted first. A linked list through the parts, by `last_use`."""

    def __init__(self) -> None:
        self.first: Part | None = None
        """The oldest part. Learned eviction reads this field of many lists, without a call."""
        self._newest: Part | None = None
        self._num_uses = 0

    def add(self, part: Part) -> None:
        self._num_uses += 1
        part.last_use = self._num_uses
        newest, self._newest = self._newest, part
        part.older = newest
        if newest is None:
            self.first = part
        else:
            newest.newer = part

    def add_used(self, part: Part, last_use: int) -> None:
        """Add `part` as the newest, with `last_use` as its number."""
        self._num_uses = last_use - 1
        self.add(part)

    def add_newer(self, part: Part, than: Part) -> None:
        part.last_use = than.last_use
        self._link(part, than)

    def add_among(self, part: Part) -> None:
        """Insert `part`, which was in another list, by its `last_use`. Parts that were split from one part have the
        same `last_use`: of these, the tail is evicted before the head, whichever is inserted first."""
        self.add_back(part)
        older = part.older
        while older is not None and older.last_use == part.last_use and older.run.start < part.run.start:
            older = older.older
        if older is not part.older:
            self.remove(part)
            self._link(part, older)

    def add_as_old(self, part: Part, than: Part) -> None:
        """Insert `part` at the place that `than`, which is in another list, would have here."""
        part.last_use = than.last_use
        self.add_back(part)

    def add_back(self, part: Part) -> None:
        """Searches from both ends: parts about to be evicted are near one, hot parts near the other."""
        old, new = self.first, self._newest
        while old is not None and new is not None:
            if old.last_use > part.last_use:
                return self._link(part, old.older)
            if new.last_use <= part.last_use:
                return self._link(part, new)
            old, new = old.newer, new.older
        return self._link(part, new)

    def _link(self, part: Part, older: Part | None) -> None:
        """Link `part` right after `older`; as the oldest if that is None."""
        newer = self.first if older is None else older.newer
        part.older, part.newer = older, newer
        if older is None:
            self.first = part
        else:
            older.newer = part
        if newer is None:
            self._newest = part
        else:
            newer.older = part

    def remove(self, part: Part) -> None:
        older, newer = part.older, part.newer
        assert older is not None or self.first is part, "not in the order"
        if older is None:
            self.first = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        part.older = part.newer = None

    def oldest(self) -> Part | None:
        return self.first

    def __iter__(self) -> Iterator[Part]:
        part = self.first
        while part is not None:
            yield part
            part = part.newer

"""The eviction order of a tier with quotas: one order for each account, and floors.

    account 0, above its floor     oldest [a][d][h] newest     the oldest parts of all accounts above their floors are
    account 1, above its floor            [b][e]               compared: `a` is evicted first
    account 2, at its floor               [c][f]               spared while an account above its floor has a part

The accounts compare their parts by the rule of the tier: LRU, the learned order, or that of checkpoints. An eviction
compares the first part of each account, so its cost grows with the number of accounts, and not with the number of
parts.

A part keeps its account as long as it is cached: splits and merges keep the root of a run, and the account follows from
the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from .._kernel.pools import LeastRecentlyUsed
from .._kernel.protocols import ComparedOrder
from .._kernel.records import Part, Run


@dataclass(slots=True, eq=False)
class Share:
    """Limits and counts of one account in one tier, in blocks."""

    floor: int
    ceiling: int
    """At most all blocks of the tier."""
    num_cached: int = 0
    """Blocks that the index knows, evictable or not."""
    num_pending: int = 0
    """Blocks that copies under way write."""
    num_evicted: int = 0
    """Blocks that were evicted for other accounts."""
    num_replaced: int = 0
    """Blocks that were evicted for blocks of the account itself."""
    num_refused: int = 0
    """Blocks that were not stored because of the ceiling or `daily_writes`."""
    is_cut: bool = False
    """Whether the last store of the account was cut."""

    def num_left(self) -> int:
        """Blocks that the account may take before it is at its ceiling. Negative if it is above its ceiling."""
        return self.ceiling - self.num_cached - self.num_pending

    def num_above(self) -> int:
        """Blocks that the account may lose before it is at its floor. Blocks of copies under way do not count, because
        the copies may fail."""
        return max(0, self.num_cached - self.floor)


class SharedUses(LeastRecentlyUsed):
    """The LRU order of one account. All accounts of a tier number their uses together, so that ages compare."""

    def __init__(self, uses: Iterator[int]) -> None:
        super().__init__()
        self._uses = uses

    def add(self, part: Part) -> None:
        self._num_uses = next(self._uses)
        super().add(part)


class AccountOrder:
    """The eviction order of one tier with quotas."""

    def __init__(
        self, number_of: Callable[[Run], int], shares: Sequence[Share], make: Callable[[], ComparedOrder] | None
    ) -> None:
        """`number_of`: the account of a run. `shares`: by account. `make`: makes the order of one account; None:
        LRU."""
        self._number_of = number_of
        self._shares = shares
        uses = count(1)
        self._own: list[ComparedOrder] = [SharedUses(uses) if make is None else make() for _ in shares]
        self.is_lru = make is None

    def _of(self, part: Part) -> ComparedOrder:
        return self._own[self._number_of(part.run)]

    def add(self, part: Part) -> None:
        self._of(part).add(part)

    def add_newer(self, part: Part, than: Part) -> None:
        """If the two are of different accounts, which only happens when the disk restores a part as the oldest one,
        `part` becomes the oldest of its account."""
        own = self._of(part)
        if own is self._of(than):
            own.add_newer(part, than)
        elif (first := own.oldest()) is None:
            part.last_use = than.last_use
            own.add_back(part)
        else:
            own.add_newer(part, first)
            own.remove(first)
            own.add_newer(first, part)

    def add_back(self, part: Part) -> None:
        self._of(part).add_back(part)

    def remove(self, part: Part) -> None:
        self._of(part).remove(part)

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        return self._of(older).are_adjacent(older, newer)

    def oldest(self) -> Part | None:
        """The first of the first parts of all accounts. The parts of accounts at their floor come last."""
        found: Part | None = None
        least: Any = None
        is_above = False
        for own, share in zip(self._own, self._shares, strict=True):
            part = own.oldest()
            if part is None:
                continue
            may_lose, key = share.num_above() >= part.width, own.key(part)
            if found is None or may_lose > is_above or (may_lose is is_above and key < least):
                found, least, is_above = part, key, may_lose
        return found

    def oldest_of(self, number: int) -> Part | None:
        """The part of the account that is evicted first."""
        return self._own[number].oldest()

    def parts_of(self, number: int) -> Iterator[Part]:
        """The parts of the account, in eviction order."""
        return iter(self._own[number])

    def unsorted_parts_of(self, number: int) -> Iterable[Part]:
        """As `parts_of`, in any order. The learned order sorts all parts before it names the first one."""
        return self._own[number].parts()

    def num_evictable(self, part: Part) -> int:
        """Units of `part`, the oldest one, that may be evicted before `oldest` has to be asked again: an account above
        its floor loses no unit that would take it below the floor."""
        num_units, above = part.stop - part.first, self._shares[self._number_of(part.run)].num_above()
        return min(num_units, above // part.width) or num_units

    def __iter__(self) -> Iterator[Part]:
        """The parts in the order in which they would be evicted if nothing else changed."""
        own, rest = self._own, [iter(own) for own in self._own]
        above = [share.num_above() for share in self._shares]
        heads: list[tuple[bool, Any, int, Part]] = []

        def push(number: int, part: Part | None) -> None:
            if part is not None:
                heappush(heads, (above[number] < part.width, own[number].key(part), number, part))

        for number, parts in enumerate(rest):
            push(number, next(parts, None))
        while heads:
            _, _, number, part = heappop(heads)
            above[number] = max(0, above[number] - len(part.blocks))
            push(number, next(rest[number], None))
            yield part

    def move(self, parts: Sequence[Part], old: int, new: int) -> None:
        """Move `parts`, in eviction order, to the account `new`, because their account is known only now."""
        for part in parts:
            self._own[old].remove(part)
            self._own[new].add_back(part)

    # -- learned eviction -----------------------------------------------------------------------------------------

    def labelled(self, part: Part, bucket: int) -> None:
        """See `LearnedOrder.labelled`."""
        self._of(part).labelled(part, bucket)  # type: ignore[attr-defined]

"""Lent blocks: device blocks that stay an engine's own. They come one by one, and each goes back as soon as nobody
here touches it any more; nothing is kept because it might hit.

Ownership is counted in handles, since an engine that caches prefixes itself lends one block to several requests. A
handle is in one hand, as a block of our own is: in a table, in a run, with a job, with a load that may yet fail, or in
quarantine. The last one that is given up gives the block back.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import attrs

from ..arguments import check_callable
from ..errors import WrongState
from .blocks import DevicePool
from .eviction import EvictionOrder
from .holding import Holding
from .index import Part
from .plan import Tier
from .tiers import TierBlocks

__all__ = ["Lent", "LentBlocks", "LentTier", "device_tier"]


@attrs.define(eq=False)
class Lent:
    """One block that was lent: to whom first, and for which place. Its bytes belong there until it is given back."""

    holding: Holding
    band: int
    index: int
    """In the table of the band."""
    num_handles: int = 1


class LentBlocks:
    """A pool that is empty of its own: block ids come in through `Ledger.lend`, and go back through `give`.

    `give(block_ids)` is called with a list in the middle of other calls, also in those of other requests and in
    `settle`. It must neither raise nor call the ledger: putting the ids into a free list is all it is for.
    """

    def __init__(self, give: Callable[[list[int]], object]) -> None:
        check_callable("give", give)
        self._give = give
        self._lent: dict[int, Lent] = {}

    def __repr__(self) -> str:
        return f"<LentBlocks {self.num_blocks} lent>"

    @property
    def num_blocks(self) -> int:
        """Blocks lent now, those in quarantine included."""
        return len(self._lent)

    @property
    def num_free(self) -> int:
        return 0

    def take(self, num_blocks: int) -> array[int]:
        assert not num_blocks, "taken more than is free"
        return array("i")

    def lend(self, holding: Holding, band: int, start: int, block_ids: array[int]) -> None:
        """A handle on each of `block_ids`, which stand in the table of `band` from index `start` on."""
        for index, block_id in enumerate(block_ids, start):
            if not block_id:
                continue
            lent = self._lent.get(block_id)
            if lent is None:
                self._lent[block_id] = Lent(holding, band, index)
            else:
                lent.num_handles += 1

    def share(self, block_ids: array[int]) -> None:
        """A handle more on each."""
        for block_id in block_ids:
            self._lent[block_id].num_handles += 1

    def keep_record(self, holding: Holding) -> None:
        """What `holding` had computed is what it was, although it begins again."""
        before = copy.copy(holding)
        before.sequence = holding.sequence.copy()
        for lent in self._lent.values():
            if lent.holding is holding:
                lent.holding = before

    def give(self, block_ids: array[int]) -> None:
        over: list[int] = []
        for block_id in block_ids:
            lent = self._lent[block_id]
            lent.num_handles -= 1
            if not lent.num_handles:
                del self._lent[block_id]
                over.append(block_id)
        if over:
            self._give(over)

    def find(self, block_id: int) -> Lent | None:
        return self._lent.get(block_id)

    def free_ids(self) -> Iterable[int]:
        return ()

    def handles(self) -> Iterator[tuple[int, int]]:
        """Each block with how many handles there are on it."""
        return ((block_id, lent.num_handles) for block_id, lent in self._lent.items())


@attrs.define(eq=False, repr=False)
class LentTier(TierBlocks):
    """pinned + quarantined = lent: nothing is free, and nothing is cached."""

    is_lent: ClassVar[bool] = True

    @property
    def _lent(self) -> LentBlocks:
        assert isinstance(self.pool, LentBlocks)
        return self.pool

    def require_own(self, call: str) -> None:
        raise WrongState(f"{call}: this ledger has no device blocks of its own: lend some")

    def keep_record(self, holding: Holding) -> None:
        self._lent.keep_record(holding)

    def share(self, block_ids: array[int]) -> array[int]:
        self._lent.share(block_ids)
        return block_ids

    def set_aside(self, block_ids: array[int]) -> array[int]:
        return block_ids

    def make_evictable(self, part: Part) -> None:
        self._lent.give(part.clear())

    def leave_front(self, part: Part, at: int) -> None:
        num_units = min(at, part.stop) - part.first
        if num_units > 0:
            self._lent.give(part.blocks[: num_units * part.width])
            del part.blocks[: num_units * part.width]
            part.first += num_units


def device_tier(pool: DevicePool, order: EvictionOrder) -> TierBlocks:
    kind = LentTier if isinstance(pool, LentBlocks) else TierBlocks
    return kind(Tier.DEVICE, pool, order)

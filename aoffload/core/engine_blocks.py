"""Engine-owned device blocks: those of an engine that has a block pool and a prefix cache of its own.

The ledger caches nothing in them and no request owns them here. They are source or destination of copies, and only jobs
hold them:

    plan_load(into=ids)   the job holds `ids` until the copy is proven over, however late
    offer(..., ids)       the job holds `ids` until the copy is over, proven or not: a stray read does no harm

Copies that can never be proven over would take the engine's pool, block by block. So above a share of its blocks in
quarantine, nothing is loaded any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..arguments import check_has
from ..errors import ConfigError
from .eviction import EvictionOrder
from .hops import Tier
from .observer import Moves
from .pools import EngineBlocks
from .tiers import TierBlocks

__all__ = ["EngineTier"]


@dataclass(slots=True, eq=False, repr=False)
class HeldBlocks:
    """A pool without free blocks: it counts what jobs hold, and tells the engine."""

    blocks: EngineBlocks
    num_blocks: int = 0
    """Blocks held now, each as often as it is held."""

    @property
    def num_free(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"<HeldBlocks {self.num_blocks} held>"

    def hold(self, block_ids: array[int]) -> None:
        self.blocks.hold(block_ids)  # first: if the engine raises, nothing is held
        self.num_blocks += len(block_ids)

    def take(self, num_blocks: int) -> array[int]:
        assert not num_blocks, "taken more than is free"
        return array("i")

    def give(self, block_ids: array[int]) -> None:
        self.num_blocks -= len(block_ids)
        self.blocks.give(block_ids)

    def free_ids(self) -> Iterable[int]:
        return ()


@dataclass(slots=True, eq=False, repr=False)
class EngineTier(TierBlocks):
    """pinned + quarantined = held by jobs: nothing is free, and nothing is cached."""

    is_outside: bool = field(default=True, init=False)
    held: HeldBlocks = field(kw_only=True)
    """The pool."""
    moves: Moves = field(kw_only=True)
    max_quarantined: int = field(kw_only=True)
    """With more blocks than that in quarantine, nothing is loaded."""

    @classmethod
    def of(cls, blocks: EngineBlocks, order: EvictionOrder, moves: Moves, max_quarantined: int) -> EngineTier:
        check_has("engine_blocks", blocks, "EngineBlocks", "hold give", ConfigError)
        held = HeldBlocks(blocks)
        return cls(Tier.DEVICE, held, order, held=held, moves=moves, max_quarantined=max_quarantined)

    @property
    def may_load(self) -> bool:
        return self.num_quarantined <= self.max_quarantined

    def quarantine(self, block_ids: array[int]) -> None:
        could_load = self.may_load
        TierBlocks.quarantine(self, block_ids)
        if could_load and not self.may_load:
            self.moves.told.loads_paused(self.num_quarantined)

    def end_quarantine(self, block_ids: array[int]) -> None:
        could_load = self.may_load
        TierBlocks.end_quarantine(self, block_ids)
        if self.may_load and not could_load:
            self.moves.told.loads_resumed(self.num_quarantined)

    def hold(self, block_ids: array[int]) -> None:
        self.held.hold(block_ids)

    def let_go(self, block_ids: array[int]) -> None:
        self.held.give(block_ids)

    @property
    def finds(self) -> bool:
        """Whether the engine can find blocks in its prefix cache."""
        return hasattr(self.held.blocks, "find")

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """Blocks that the engine still has in its prefix cache; zeros if it has no `find`."""
        find = getattr(self.held.blocks, "find", None)
        return [0] * (stop - start) if find is None else find(request_id, group, start, stop)

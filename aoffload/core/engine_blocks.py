"""Engine-owned device blocks: those of an engine that has a block pool and a prefix cache of its own.

No tier caches anything in them and no request owns them here. They are an end of copies, and only jobs hold them:

    plan_load(into=ids)   the job holds `ids` until the copy is over; if nobody can prove that, until late proof
    offer(..., ids)       the job holds `ids` until the copy is over, or nobody can prove it: a stray reader harms none
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import attrs

from ..arguments import check_has
from ..errors import ConfigError
from .eviction import EvictionOrder
from .plan import Tier
from .tiers import TierBlocks

__all__ = ["EngineBlocks", "EngineTier", "FindsBlocks"]


class EngineBlocks(Protocol):
    """The device blocks of an engine: what it is told of them.

    Both are called in the middle of other calls, also of those about other requests. They must neither raise nor call
    the ledger: a counter for each block is all they are for. A block may be held several times, and is given as often.
    """

    def hold(self, block_ids: array[int]) -> object:
        """A copy touches these blocks from now on: they must keep what they hold, and be nobody else's, until they are
        given. vLLM: `touch`."""
        ...

    def give(self, block_ids: array[int]) -> object:
        """It does no more. vLLM: `free_blocks`."""
        ...


class FindsBlocks(EngineBlocks, Protocol):
    """Of an engine that can say where its prefix cache still has what a request's table names no more."""

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """Blocks `[start, stop)` of the tokens of a request, of group number `group`; 0 where there is none."""
        ...


@attrs.define(eq=False)
class HeldBlocks:
    """A pool that has no block to give away: it counts what jobs hold, and tells the engine."""

    blocks: EngineBlocks
    num_blocks: int = 0
    """Blocks held now, each as often as it is held."""
    num_free: ClassVar[int] = 0

    def __repr__(self) -> str:
        return f"<HeldBlocks {self.num_blocks} held>"

    def hold(self, block_ids: array[int]) -> None:
        self.num_blocks += len(block_ids)
        self.blocks.hold(block_ids)

    def take(self, num_blocks: int) -> array[int]:
        assert not num_blocks, "taken more than is free"
        return array("i")

    def give(self, block_ids: array[int]) -> None:
        self.num_blocks -= len(block_ids)
        self.blocks.give(block_ids)

    def free_ids(self) -> Iterable[int]:
        return ()


@attrs.define(eq=False, repr=False)
class EngineTier(TierBlocks):
    """pinned + quarantined = held by jobs: nothing is free, and nothing is cached."""

    is_outside: ClassVar[bool] = True

    @classmethod
    def of(cls, blocks: EngineBlocks, order: EvictionOrder) -> EngineTier:
        check_has("engine_blocks", blocks, "EngineBlocks", "hold give", ConfigError)
        return cls(Tier.DEVICE, HeldBlocks(blocks), order)

    @property
    def _held(self) -> HeldBlocks:
        assert isinstance(self.pool, HeldBlocks)
        return self.pool

    def hold(self, block_ids: array[int]) -> None:
        self._held.hold(block_ids)

    def let_go(self, block_ids: array[int]) -> None:
        self._held.give(block_ids)

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """Blocks that the engine still has in its prefix cache; none, where it can't say."""
        find = getattr(self._held.blocks, "find", None)
        return [0] * (stop - start) if find is None else find(request_id, group, start, stop)

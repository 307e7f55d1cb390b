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
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import attrs

from ..arguments import check_has
from ..errors import ConfigError, InvalidArgument
from .eviction import EvictionOrder
from .observer import Moves
from .plan import Tier
from .tiers import TierBlocks

__all__ = ["EngineBlocks", "EngineTier", "FindsBlocks"]


class EngineBlocks(Protocol):
    """What an engine is told of its device blocks.

    Both are called in the middle of ledger calls, also of those about other requests. They must neither raise nor call
    the ledger: they only count references of each block. A block may be held several times, and is given as often.
    Where `hold` raises all the same, its call of the ledger copies nothing and raises `InvalidArgument`; what `give`
    raises, the next `settle` does.
    """

    def hold(self, block_ids: array[int]) -> object:
        """A copy touches these blocks from now on: keep their contents, and do not reuse them, until `give`. vLLM:
        `touch`."""
        ...

    def give(self, block_ids: array[int]) -> object:
        """The copy does not touch them any more. vLLM: `free_blocks`."""
        ...


class FindsBlocks(EngineBlocks, Protocol):
    """For an engine that can find, in its prefix cache, blocks that a request's table no longer names."""

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """Blocks `[start, stop)` of a request's tokens in group number `group`; 0 where there is none."""
        ...


@attrs.define(eq=False)
class HeldBlocks:
    """A pool without free blocks: it counts what jobs hold, and tells the engine."""

    blocks: EngineBlocks
    num_blocks: int = 0
    """Blocks held now, each as often as it is held."""
    num_free: ClassVar[int] = 0
    _failed: dict[str, Exception] = attrs.field(factory=dict)
    """What `hold` or `give` has raised, until it is told."""
    _not_held: Counter[int] = attrs.field(factory=Counter)
    """Blocks that `hold` has raised about: they are not given either, since who knows what was counted."""

    def __repr__(self) -> str:
        return f"<HeldBlocks {self.num_blocks} held>"

    def failure(self, call: str) -> InvalidArgument | None:
        """What the engine's `call` has raised since this was last asked."""
        error = self._failed.pop(call, None)
        if error is None:
            return None
        failure = InvalidArgument("engine_blocks", f"its {call} raised {error!r}")
        failure.__cause__ = error
        return failure

    def hold(self, block_ids: array[int]) -> None:
        self.num_blocks += len(block_ids)
        try:
            self.blocks.hold(block_ids)
        except Exception as error:  # noqa: BLE001 - in the middle of a change: raised once that is whole
            self._not_held.update(block_ids)
            self._failed.setdefault("hold", error)

    def take(self, num_blocks: int) -> array[int]:
        assert not num_blocks, "taken more than is free"
        return array("i")

    def give(self, block_ids: array[int]) -> None:
        self.num_blocks -= len(block_ids)
        if self._not_held:
            block_ids = self._without_not_held(block_ids)
        try:
            self.blocks.give(block_ids)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed.setdefault("give", error)

    def _without_not_held(self, block_ids: array[int]) -> array[int]:
        held = array("i")
        for block_id in block_ids:
            if self._not_held[block_id]:
                self._not_held[block_id] -= 1
            else:
                held.append(block_id)
        self._not_held = +self._not_held
        return held

    def free_ids(self) -> Iterable[int]:
        return ()


@attrs.define(eq=False, repr=False)
class EngineTier(TierBlocks):
    """pinned + quarantined = held by jobs: nothing is free, and nothing is cached."""

    is_outside: ClassVar[bool] = True
    moves: Moves = attrs.field(kw_only=True)
    max_quarantined: int = attrs.field(kw_only=True)
    """With more blocks than that in quarantine, nothing is loaded."""

    @classmethod
    def of(cls, blocks: EngineBlocks, order: EvictionOrder, moves: Moves, max_quarantined: int) -> EngineTier:
        check_has("engine_blocks", blocks, "EngineBlocks", "hold give", ConfigError)
        return cls(Tier.DEVICE, HeldBlocks(blocks), order, moves=moves, max_quarantined=max_quarantined)

    @property
    def may_load(self) -> bool:
        return self.num_quarantined <= self.max_quarantined

    def quarantine(self, block_ids: array[int]) -> None:
        could_load = self.may_load
        super().quarantine(block_ids)
        if could_load and not self.may_load:
            self.moves.told.loads_paused(self.num_quarantined)

    def end_quarantine(self, block_ids: array[int]) -> None:
        could_load = self.may_load
        super().end_quarantine(block_ids)
        if self.may_load and not could_load:
            self.moves.told.loads_resumed(self.num_quarantined)

    @property
    def _held(self) -> HeldBlocks:
        assert isinstance(self.pool, HeldBlocks)
        return self.pool

    def failure(self, call: str) -> InvalidArgument | None:
        """What the engine's `hold` or `give` has raised, once."""
        return self._held.failure(call)

    def hold(self, block_ids: array[int]) -> None:
        self._held.hold(block_ids)

    def let_go(self, block_ids: array[int]) -> None:
        self._held.give(block_ids)

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """Blocks that the engine still has in its prefix cache; zeros if it has no `find`."""
        find = getattr(self._held.blocks, "find", None)
        return [0] * (stop - start) if find is None else find(request_id, group, start, stop)

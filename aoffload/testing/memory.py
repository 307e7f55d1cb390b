"""Simulated memories that track owners. Each block has a tag and a generation, which counts its owners. A change of
owner poisons the block.

The KV of a block is a function of the prefix that ends in it, so a tag for that prefix stands for its bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import attrs

from .._common.tiers import Tier
from .._kernel.protocols import DevicePool
from .._tiers.disk.rules import SlotPool
from .violations import Violation

__all__ = ["POISON", "TORN", "Memory", "OwnedPool", "OwnedSlots", "Tags"]

POISON = 0
"""Content of a block that was not written since its owner changed."""
TORN = -1
"""Content of a block that a copy left half-written, or that a fault changed."""


class Tags:
    """One number for each prefix, in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, identity: object) -> int:
        return self._numbers.setdefault(identity, len(self._numbers) + 1)

    def name(self, tag: int) -> str:
        """The prefix of a tag, as text for reports."""
        special = {POISON: "poison", TORN: "torn"}
        found = next((identity for identity, number in self._numbers.items() if number == tag), "garbage")
        return special.get(tag) or repr(found)


@attrs.define(eq=False)
class Memory:
    """The blocks of one tier: `content[block_id]` is a tag, `generation[block_id]` counts how often the block was
    allocated."""

    tier: Tier
    num_rows: int
    content: list[int] = attrs.field(init=False)
    generation: list[int] = attrs.field(init=False)
    is_owned: list[bool] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.content = [POISON] * self.num_rows
        self.generation = [0] * self.num_rows
        self.is_owned = [False] * self.num_rows

    def hand_out(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self.is_owned[block_id]:
                raise Violation("two owners", f"{self.tier.name} block {block_id} was handed out twice")
            self.is_owned[block_id] = True
            self.generation[block_id] += 1

    def take_back(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if not self.is_owned[block_id]:
                raise Violation("two owners", f"{self.tier.name} block {block_id} was given back twice")
            self.is_owned[block_id] = False

    def generations(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.generation[block_id] for block_id in block_ids)

    def check_owner(self, what: str, block_id: int, generation: int) -> None:
        """Check that `what` may touch the block: only the owner of `generation` may."""
        if not self.is_owned[block_id] or self.generation[block_id] != generation:
            state = "another owner" if self.is_owned[block_id] else "no owner"
            raise Violation("ownership", f"{what} touches {self.tier.name} block {block_id}, which has {state} by now")

    def poison(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.content[block_id] = POISON

    def holders(self, tag: int) -> list[int]:
        """Owned blocks with that content."""
        return [block for block, found in enumerate(self.content) if found == tag and self.is_owned[block]]


@attrs.define(eq=False)
class OwnedPool:
    """A pool that records every change of owner in its `Memory`."""

    pool: DevicePool
    memory: Memory
    poison: Callable[[array[int]], None]
    """Poisons blocks whose owner changes: at once, or in order on the device's stream."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def take(self, num_blocks: int) -> array[int]:
        block_ids = self.pool.take(num_blocks)
        self.memory.hand_out(block_ids)
        self.poison(block_ids)
        return block_ids

    def give(self, block_ids: array[int]) -> None:
        self.memory.take_back(block_ids)
        self.poison(block_ids)
        self.pool.give(block_ids)

    def free_ids(self) -> Iterable[int]:
        return self.pool.free_ids()


@attrs.define(eq=False)
class OwnedSlots(OwnedPool):
    """The same for a disk, where slots that a restart has found are taken by their ids. After a change of owner, a slot
    keeps its contents until it is written."""

    @property
    def _slots(self) -> SlotPool:
        assert isinstance(self.pool, SlotPool)
        return self.pool

    def take_ids(self, block_ids: array[int]) -> None:
        self.memory.hand_out(block_ids)
        self._slots.take_ids(block_ids)

    def are_free(self, block_ids: Sequence[int]) -> bool:
        return self._slots.are_free(block_ids)

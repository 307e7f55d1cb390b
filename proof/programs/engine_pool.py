"""The blocks of a simulated engine: referenced by block tables and jobs, free without a reference, and hit until they
are reused."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

from aoffload.testing.memory import Memory
from aoffload.testing.violations import Violation

from .program import World

__all__ = ["EnginePool", "FindingPool", "Key", "pool_of"]

Key: TypeAlias = tuple[int, int]
"""A group, and the prefix (interned) that ends with a block."""


class EnginePool:
    """Blocks `[1, num_rows)`. A free block keeps its bytes, and hits, until it is taken: the last one given back first
    (`reuses_last`), or the oldest first."""

    def __init__(self, num_rows: int, *, reuses_last: bool, memory: Memory | None = None) -> None:
        self.num_tables: Counter[int] = Counter()
        """How many tables name a block."""
        self.held: Counter[int] = Counter()
        """How often jobs hold a block."""
        self.free = dict.fromkeys(range(1, num_rows))
        self.prefixes: dict[str, Callable[[int], int]] = {}
        """By request: the number of the prefix of so many of its tokens."""
        self.block_sizes: list[int] = []
        self._reuses_last = reuses_last
        self._memory = memory
        self._cached: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    def engine_blocks(self) -> Any:
        """The `engine_blocks` of a ledger: methods only, so that a ledger's fingerprint leaves the pool out."""
        return SimpleNamespace(hold=self.hold, give=self.give)

    # -- what the ledger tells ------------------------------------------------------------------------------------

    def hold(self, block_ids: array[int]) -> None:
        for block_id in block_ids:
            self.held[block_id] += 1
            self._in_use(block_id)

    def give(self, block_ids: array[int]) -> None:
        for block_id in block_ids:
            if not self.held[block_id]:
                raise Violation("a job's blocks", f"block {block_id} is given and was not held")
            self._less(self.held, block_id)

    # -- what requests do -----------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> list[int]:
        """Take blocks for a table; the caller has checked that enough are free."""
        found = list(self.free)[-num_blocks:] if self._reuses_last else list(self.free)[:num_blocks]
        for block_id in found if num_blocks else ():
            self._in_use(block_id)
            self.forget(block_id)
            self.num_tables[block_id] += 1
        return found if num_blocks else []

    def share(self, block_ids: Iterable[int]) -> None:
        """Another table names these blocks, too."""
        for block_id in filter(None, block_ids):
            self.num_tables[block_id] += 1
            self._in_use(block_id)

    def drop(self, block_ids: Iterable[int]) -> None:
        """A table names these blocks no more."""
        for block_id in filter(None, block_ids):
            self._less(self.num_tables, block_id)

    def _in_use(self, block_id: int) -> None:
        if block_id in self.free:
            del self.free[block_id]
            if self._memory is not None:
                self._memory.hand_out((block_id,))

    def _less(self, counts: Counter[int], block_id: int) -> None:
        counts[block_id] -= 1
        if not counts[block_id]:
            del counts[block_id]
        if block_id not in self.num_tables and block_id not in self.held:
            self.free[block_id] = None
            if self._memory is not None:
                self._memory.take_back((block_id,))

    # -- the prefix cache -----------------------------------------------------------------------------------------

    def cache(self, key: Key, block_id: int) -> None:
        if key not in self._cached and block_id not in self._keys:
            self._cached[key], self._keys[block_id] = block_id, key

    def cached(self, key: Key) -> int:
        """The block that caches `key`; 0: none."""
        return self._cached.get(key, 0)

    def forget(self, block_id: int) -> None:
        self._cached.pop(self._keys.pop(block_id, (-1, -1)), None)

    def all_cached(self) -> list[int]:
        return list(self._keys)


class FindingPool(EnginePool):
    """A pool that can find cached blocks which a request's tables name no more (`find`)."""

    def engine_blocks(self) -> Any:
        return SimpleNamespace(hold=self.hold, give=self.give, find=self.find)

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        prefix, size = self.prefixes[request_id], self.block_sizes[group]
        return [self.cached((group, prefix((at + 1) * size))) for at in range(start, stop)]


def pool_of(world: World, memory: Memory | None = None) -> EnginePool:
    """The pool of the engine in `world`. `memory` is told who owns a block."""
    kind = FindingPool if world.num_host_blocks % 2 else EnginePool
    pool = kind(world.num_device_blocks, reuses_last=world.num_device_blocks % 2 == 0, memory=memory)
    pool.block_sizes = [shape.block_size for shape in world.groups]
    return pool

"""vLLM's blocks as the ledger sees them: held by copies, named in block tables, found in vLLM's prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import attrs

__all__ = ["BlockTable", "EnginePool"]


class BlockTable(Sequence[int]):
    """The ids of a list of vLLM's blocks. An id is read when it is asked for: tables are long, and few of it are."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [block.block_id for block in self._blocks[at]]
        return self._blocks[at].block_id


@attrs.define(eq=False)
class EnginePool:
    """`EngineBlocks` over vLLM's `BlockPool`. All groups share one pool, so an id names one block in all of them."""

    pool: Any
    group_ids: Sequence[int]
    """vLLM's number of each group of the ledger."""
    block_sizes: Sequence[int]
    """Tokens per block, group by group."""
    hashes_of: Callable[[str], Sequence[Any]]
    """The block hashes of a request, one for each `hash_block_size` tokens; none if the request is not known."""

    def hold(self, block_ids: array[int]) -> None:
        blocks = self.pool.blocks
        self.pool.touch([blocks[block_id] for block_id in block_ids])

    def give(self, block_ids: array[int]) -> None:
        blocks = self.pool.blocks
        self.pool.free_blocks([blocks[block_id] for block_id in reversed(block_ids)])  # evict a prefix from its end

    def find(self, request_id: str, group: int, start: int, stop: int) -> list[int]:
        """Blocks that are no longer in the request's table, because they left the window or the request has ended, but
        are still in vLLM's cache."""
        per_block = self.block_sizes[group] // self.pool.hash_block_size
        hashes, group_id = self.hashes_of(request_id), [self.group_ids[group]]
        found = []
        for at in range(start, stop):
            last = (at + 1) * per_block - 1
            cached = self.pool.get_cached_block(hashes[last], group_id) if last < len(hashes) else None
            found.append(cached[0].block_id if cached else 0)
        return found

    def is_private(self, block_id: int) -> bool:
        """Whether nobody refers to the block but the one request that has it: no copy may still write to it."""
        return bool(self.pool.blocks[block_id].ref_cnt == 1)

    @property
    def is_all_free(self) -> bool:
        """Whether no block is in use. The null block is never free, and does not count."""
        return bool(self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1)

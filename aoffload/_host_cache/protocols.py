"""Protocols for an engine that owns its device blocks. An object of any class may implement them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol


class EngineBlocks(Protocol):
    """An engine's pool of device blocks, as the ledger calls it.

    The ledger calls both methods in the middle of its own calls, including calls about other requests. They must not
    raise and must not call the ledger: they only count references of each block. The ledger may hold a block several
    times, and then gives it back as often. If a load ended UNPROVEN or took too long, the ledger gives back its blocks
    only once the copy is proven to be over. In `give`, free the last blocks of a table first, so that the pool reuses
    them before the first blocks.
    """

    def hold(self, block_ids: array[int]) -> object:
        """Keep the contents of these blocks and do not reuse them until `give`, because a copy touches them. vLLM:
        `touch`."""
        ...

    def give(self, block_ids: array[int]) -> object:
        """The copy no longer touches these blocks. vLLM: `free_blocks`."""
        ...


class FindsBlocks(EngineBlocks, Protocol):
    """For an engine that can find blocks in its prefix cache after a request's table no longer names them."""

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """The engine's ids of blocks `[start, stop)` of a request, in group number `group`. The id is 0 for a block
        that the engine does not have, or whose forward is not submitted yet. The request may be over. If several
        requests had this id, return blocks of the last one. You may return a free block: then `hold` has to remove it
        from the free list. vLLM: `get_cached_block`."""
        ...

"""Protocols for an engine that owns its device blocks. An object of any class may implement them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol


class EngineBlocks(Protocol):
    """An engine's pool of device blocks, as the ledger calls it.

    The ledger calls both methods in the middle of its own calls, including calls about other requests. They must not
    raise and must not call the ledger: they only count references of each block. The ledger may hold a block several
    times, and gives it back as often. It gives back the blocks of a load that ended UNPROVEN, or took too long, only
    once the copy is proven to be over. Give back the last blocks of a table first, so that the pool reuses them before
    the first blocks.
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
        """The engine's ids of blocks `[start, stop)` of a request, in group number `group`. 0 for a block that the
        engine does not have, or whose forward is not submitted yet. The request may be over. If several requests had
        this id, return blocks of the last one. A free block may be returned: then `hold` has to remove it from the free
        list. vLLM: `get_cached_block`."""
        ...

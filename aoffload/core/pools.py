"""Who else may hand out device blocks: pools and engines of any class. This file is never compiled, so that they can
derive from one of these."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["DevicePool", "EngineBlocks", "FindsBlocks", "TakesIds"]


class DevicePool(Protocol):
    """Hands out block ids and takes them back: a `FreeList`, unless the blocks are engine-owned."""

    @property
    def num_blocks(self) -> int:
        """All usable blocks, without the null block."""
        ...

    @property
    def num_free(self) -> int: ...

    def take(self, num_blocks: int) -> array[int]:
        """Take exactly `num_blocks` ids. The caller has checked that there are enough."""
        ...

    def give(self, block_ids: array[int]) -> None: ...

    def free_ids(self) -> Iterable[int]: ...


class TakesIds(DevicePool, Protocol):
    """A pool of slots on a disk: what a restart has found is taken by its ids."""

    def are_free(self, block_ids: Sequence[int]) -> bool: ...

    def take_ids(self, block_ids: array[int]) -> None: ...


class EngineBlocks(Protocol):
    """What an engine is told of its device blocks.

    Both are called in the middle of ledger calls, also of those about other requests. They must neither raise nor call
    the ledger: they only count references of each block. A block may be held several times, and is given as often.
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
        """Blocks `[start, stop)` of a request's tokens in group number `group`; 0 for a block that the engine
        does not have, or that a forward will write that is not submitted yet. A `request_id` of
        `Ledger.deferred_requests` may be over: then it is the last request with that id."""
        ...
